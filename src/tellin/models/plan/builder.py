"""`PlanBuilder`: one method per operation, so that an architecture file reads like its paper.

The builder looks weights up by name, checks every shape while recording and gives each value a
buffer of its own: the passes in `tellin.models.plan.passes` fuse operations and share buffers
afterwards. It computes nothing and reads no tensor data. A plan that was recorded is complete:
`PlanBuilder.finish` refuses a model that has tensors which the architecture did not use.
"""

from __future__ import annotations

from tellin.exceptions import UnsupportedModelError
from tellin.loading.hparams import MAX_EXPERTS, MAX_EXPERTS_PER_TOKEN
from tellin.loading.tensors import TensorRef
from tellin.models.plan import ir
from tellin.models.plan.elementwise import ScaleByPosition, Xielu
from tellin.models.plan.ir import Buffer, Rows
from tellin.models.plan.recorder import GATED_ACTIVATIONS, ones
from tellin.models.plan.recurrent_builder import RecurrentBuilder
from tellin.models.plan.streams import AddScaled, KeepLargest, MatchMagnitude


class PlanBuilder(RecurrentBuilder):
    """Records a `Plan` from ``source``, to run contexts of up to ``max_model_len`` tokens.

    With ``pooling`` the plan ends with the hidden states: a model's head need not be there.

    Methods take and return buffers; ``name`` arguments are tensor names without ``.weight`` and
    ``.bias``, and also name the buffer that is made.

    Raises (every method): `ModelLoadError` when a tensor is missing or does not fit, with its name
    and both shapes.
    """

    # ---- from token ids ----------------------------------------------------------------------

    def embed(
        self,
        name: str,
        scale: float = 1.0,
        width: int | None = None,
        rest_is_first: bool = False,
        given_scale: float = 1.0,
    ) -> Buffer:
        """Token embedding, ``[num_tokens, width]``; None = hidden_size.

        ``rest_is_first``: the table may end before the vocabulary; ids behind it take row 0.
        ``given_scale``: what rows of a prompt of embeddings are multiplied by.
        """
        weight = self._matrix(f"{name}.weight", width or self.hparams.hidden_size)
        if weight.shape[0] != self.hparams.vocab_size and not rest_is_first:
            raise self._error(
                f"tensor {weight.name!r} has {weight.shape[0]} rows; "
                f"vocab_size is {self.hparams.vocab_size}"
            )
        out = self._buffer(weight.shape[1], Rows.TOKENS, name)
        self._ops.append(ir.Embed(weight, out, scale, rest_is_first, given_scale))
        return out

    def input(self, width: int) -> Buffer:
        """Rows that the caller gives, ``[num_tokens, width]``."""
        out = self._buffer(width, Rows.TOKENS, "input")
        self._ops.append(ir.Input(out))
        return out

    def add_position_embedding(self, x: Buffer, name: str) -> Buffer:
        """Add learned absolute positions in place."""
        self._needs_token_rows(x, "a position embedding")
        weight = self._matrix(f"{name}.weight", x.width)
        offset, wanted = self.hparams.position_offset, self.hparams.max_position_embeddings
        if weight.shape[0] < offset + wanted:
            of_others = f" and the first {offset} are not used" if offset else ""
            raise self._error(
                f"tensor {weight.name!r} has {weight.shape[0]} rows; max_position_embeddings is "
                f"{wanted}{of_others}"
            )
        if offset:
            weight = self.weight(weight.name, rows=(offset, weight.shape[0]))
        self._ops.append(ir.AddPositionEmbedding(x, weight))
        return x

    def add_given(self, x: Buffer, part: int) -> Buffer:
        """Add in place, to rows that the caller gives, the ``part``-th row behind the embedding."""
        self._needs_token_rows(x, "what is added to given rows")
        self._ops.append(ir.AddGiven(x, part * x.width))
        return x

    def add_token_type_embedding(self, x: Buffer, name: str) -> Buffer:
        """Add in place the row of each token's type: which text of a pair it belongs to."""
        self._needs_token_rows(x, "a token type embedding")
        self._ops.append(ir.AddTokenTypeEmbedding(x, self._matrix(f"{name}.weight", x.width)))
        return x

    # ---- norms -------------------------------------------------------------------------------

    def rms_norm(
        self,
        x: Buffer,
        name: str,
        *,
        group: int | None = None,
        shared: bool = True,
        weight_offset: float | None = None,
        has_weight: bool = True,
        eps: float | None = None,
    ) -> Buffer:
        """RMSNorm of each row, or of each group of ``group`` values (per-head norm).

        Groups have one weight unless not ``shared``: then each has its part of a wide one.
        ``weight_offset``: added to the weight; None = what the model adds to all its norms'.
        ``has_weight=False``: the model has no weight for it.
        ``eps``: None = that of the model.
        """
        if group is not None and x.width % group:
            raise self._error(f"{x.name} has width {x.width}, not a multiple of group {group}")
        hp = self.hparams
        size = group if group is not None and shared else x.width
        offset = hp.norm_weight_offset if weight_offset is None else weight_offset
        weight = self._vector(f"{name}.weight", size) if has_weight else ones(name, size)
        offset = offset if has_weight else 0.0
        out = self._buffer(x.width, x.rows, name)
        self._ops.append(ir.RmsNorm(x, weight, out, eps or hp.norm_eps, offset, group))
        return out

    def layer_norm(self, x: Buffer, name: str) -> Buffer:
        """LayerNorm of each row; the bias is optional."""
        weight = self._vector(f"{name}.weight", x.width)
        bias = self._optional_vector(f"{name}.bias", x.width)
        out = self._buffer(x.width, x.rows, name)
        self._ops.append(ir.LayerNorm(x, weight, bias, out, self.hparams.norm_eps))
        return out

    # ---- linear ------------------------------------------------------------------------------

    def linear(self, x: Buffer, name: str, *, bias: bool | None = None) -> Buffer:
        """Linear layer. ``bias``: True = required, False = none, None = if the model has it."""
        weight = self._matrix(f"{name}.weight", x.width)
        bias_name = f"{name}.bias"
        bias_tensor = None
        if bias or (bias is None and self.has(bias_name)):
            bias_tensor = self._vector(bias_name, weight.shape[0])
        out = self._buffer(weight.shape[0], x.rows, name)
        self._ops.append(ir.Linear(x, weight, bias_tensor, out))
        return out

    def linear_rows(self, x: Buffer, name: str, rows: tuple[int, int]) -> Buffer:
        """Rows ``[start, stop)`` of a linear layer without bias."""
        self._matrix(f"{name}.weight", x.width)
        weight = self.weight(f"{name}.weight", rows=rows)
        out = self._buffer(weight.shape[0], x.rows, weight.name)
        self._ops.append(ir.Linear(x, weight, None, out))
        return out

    def head_linear(self, x: Buffer, name: str, rows: int) -> Buffer:
        """A linear layer of ``rows`` outputs for each head; see `ir.HeadLinear`."""
        heads = self.hparams.num_attention_heads
        weight = self.weight(f"{name}.weight")
        if len(weight.shape) != 2 or weight.shape[0] != heads * rows:
            raise self._shape_error(weight, f"({heads} * {rows}, n)")
        width = x.width // heads
        if width * heads != x.width or weight.shape[1] > width:
            raise self._shape_error(weight, f"(n, {width}) at most: {x.name} is {x.width} wide")
        out = self._buffer(heads * (rows + width - weight.shape[1]), x.rows, name)
        self._ops.append(ir.HeadLinear(x, weight, out, heads))
        return out

    def experts(
        self,
        x: Buffer,
        router: Buffer,
        name: str,
        *,
        top_k: int,
        normalize: bool,
        scoring: str = "softmax",
        selection_bias: str | None = None,
        scale: float = 1.0,
        needs_biases: bool = False,
        scales: str | None = None,
        act: str | None = None,
        gated: bool = True,
    ) -> Buffer:
        """Mixture of experts: the ``top_k`` experts of ``router``'s logits, by their softmax.

        ``router`` ``[rows, num_experts]``; expert e is the gated MLP ``{name}.experts.{e}``. There
        must be as many as the hyperparameters say, if they do.
        ``normalize``: the chosen experts' shares add up to 1. Their matrices have biases if the
        first one's has, or ``needs_biases``. ``scoring`` and ``scale`` are those of `ir.Experts`;
        ``selection_bias`` and ``scales`` are names of vectors. ``act``: not ``hidden_act``. Not
        ``gated``: ``down(act(up(x)) * up(x))``, with relu its square.
        """
        count = router.width
        factors = None if scales is None else self._vector(scales, count)
        bias = None if selection_bias is None else self._vector(selection_bias, count)
        if x.rows is not router.rows:
            raise self._error(f"{x.name} and {router.name} must have the same rows")
        if self.hparams.num_experts not in (0, count):
            raise self._error(
                f"{name}: the router has rows for {count} experts, but num_experts is "
                f"{self.hparams.num_experts}"
            )
        if count > MAX_EXPERTS or not 1 <= top_k <= min(MAX_EXPERTS_PER_TOKEN, count):
            raise UnsupportedModelError(
                f"{self.source.path}: {top_k} of {count} experts per token in {name}; supported "
                f"are up to {MAX_EXPERTS} experts, of which a token uses 1 to "
                f"{MAX_EXPERTS_PER_TOKEN} and not more than there are"
            )
        up = self._stack(f"{name}.experts", "up_proj", count, x.width)
        gate_name = "gate_proj" if gated else "up_proj"
        gate = self._stack(f"{name}.experts", gate_name, count, x.width) if gated else up
        if up[0].shape != gate[0].shape:
            raise self._shape_error(up[0], str(gate[0].shape))
        down = self._stack(f"{name}.experts", "down_proj", count, gate[0].shape[0])
        out = self._buffer(down[0].shape[0], x.rows, f"{name}.experts")
        gate_bias, up_bias, down_bias = (
            self._biases(f"{name}.experts", part, stack, needs_biases)
            for part, stack in ((gate_name, gate), ("up_proj", up), ("down_proj", down))
        )
        if not len(gate_bias) == len(up_bias) == len(down_bias):
            raise self._error(f"{name}: some matrices of the experts have biases, others none")
        self._ops.append(
            ir.Experts(
                x, router, gate, up, down, out, self._activation(GATED_ACTIVATIONS, act), top_k,
                normalize, gate_bias, up_bias, down_bias, scoring, bias, scale, factors,
                self.hparams.expert_groups, self.hparams.expert_top_groups,
            )
        )  # fmt: skip
        return out

    def _biases(
        self, name: str, part: str, stack: tuple[TensorRef, ...], required: bool
    ) -> tuple[TensorRef, ...]:
        """The bias of every expert's matrix ``part``; none if the first has none and need not."""
        if not (required or self.has(f"{name}.0.{part}.bias")):
            return ()
        return tuple(
            self._vector(f"{name}.{e}.{part}.bias", matrix.shape[0])
            for e, matrix in enumerate(stack)
        )

    def _stack(self, name: str, part: str, count: int, width: int) -> tuple[TensorRef, ...]:
        """The matrix ``part`` of every expert: alike in shape and storage type."""
        stack = tuple(self._matrix(f"{name}.{e}.{part}.weight", width) for e in range(count))
        for tensor in stack:
            if tensor.shape != stack[0].shape:
                raise self._shape_error(tensor, str(stack[0].shape))
            if tensor.quant_type != stack[0].quant_type:
                raise self._error(
                    f"tensor {tensor.name!r} is {tensor.quant_type.name} and {stack[0].name!r} "
                    f"{stack[0].quant_type.name}; experts of a layer must be stored alike"
                )
        return stack

    # ---- attention ---------------------------------------------------------------------------

    def rope(
        self, x: Buffer, table: ir.RotaryTable, head_dim: int | None = None, offset: int = 0
    ) -> Buffer:
        """Rotate every head of ``x`` in place from dimension ``offset`` on.

        ``head_dim``: None = the model's.
        """
        self._needs_token_rows(x, "rope")
        head_dim = head_dim or self.hparams.head_dim
        if x.width % head_dim or offset + 2 * len(table.inv_freq) > head_dim:
            raise self._error(
                f"cannot rotate {2 * len(table.inv_freq)} dimensions of heads of {head_dim} "
                f"in {x.name} of width {x.width}"
            )
        num_heads, interleaved = x.width // head_dim, self.hparams.rope_interleaved
        self._ops.append(ir.Rope(x, table, num_heads, head_dim, interleaved, offset))
        return x

    def attention(
        self,
        q: Buffer,
        k: Buffer | None,
        v: Buffer | None,
        *,
        name: str,
        sliding_window: int | None = None,
        causal: bool = True,
        has_sinks: bool = False,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
        value_dim: int | None = None,
        kv_layer: int | None = None,
        windowed: bool = False,
    ) -> Buffer:
        """Attention over the request's KV cache; a causal one adds a layer to the cache.

        ``has_sinks``: the model has a score ``{name}.sinks.weight`` per head. ``head_dim`` and
        ``num_kv_heads``: None = the model's; ``value_dim``: None = head_dim. ``kv_layer``: read
        this layer of the cache, filled before, and add none; then there are no k and v.
        ``windowed``: see `ir.Attention`.
        """
        hp = self.hparams
        head_dim = head_dim or hp.head_dim
        heads, kv_heads = hp.num_attention_heads, num_kv_heads or hp.num_key_value_heads
        for x, count, size, what in (
            (q, heads, head_dim, "num_attention_heads"),
            (k, kv_heads, head_dim, "num_key_value_heads"),
            (v, kv_heads, value_dim or head_dim, "num_key_value_heads"),
        ):
            if x is None:
                continue
            self._needs_token_rows(x, "attention")
            if x.width != count * size:
                raise self._error(
                    f"{x.name} has {x.width} outputs; {what} * head_dim is "
                    f"{count} * {size} = {count * size}"
                )
        if heads % kv_heads:
            raise self._error(
                f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )
        layer = -1
        if kv_layer is not None:
            layer = kv_layer
        elif causal:
            layer = len(self._kv_layers)
            self._kv_layers.append(ir.KVCacheLayer(kv_heads, head_dim, sliding_window, value_dim))
        out = self._buffer(heads * (value_dim or head_dim), Rows.TOKENS, name)
        scale = head_dim**-0.5 if hp.attention_scale is None else hp.attention_scale
        sinks = self._vector(f"{name}.sinks.weight", heads) if has_sinks else None
        self._ops.append(
            ir.Attention(
                q, k, v, out, layer, heads, kv_heads, head_dim, scale,
                sliding_window, hp.attn_logit_softcapping, causal, sinks, value_dim, windowed,
            )
        )  # fmt: skip
        return out

    # ---- elementwise -------------------------------------------------------------------------

    def act_mul(
        self, gate: Buffer, up: Buffer, act: str | None = None, up_start: int | None = None
    ) -> Buffer:
        """``act(gate) * up``; None = ``hidden_act``.

        With ``up_start`` by as many columns of a wider ``up`` from there on.
        """
        if up_start is None:
            self._same_shape(gate, up)
        elif up.rows is not gate.rows or not 0 <= up_start <= up.width - gate.width:
            raise self._error(
                f"{up.name} of width {up.width} has no {gate.width} columns from {up_start} on"
            )
        out = self._buffer(gate.width, gate.rows, f"{gate.name}.act_mul")
        known = self._activation(GATED_ACTIVATIONS, act)
        self._ops.append(ir.ActMul(gate, up, out, known, up_start or 0))
        return out

    def mul(self, x: Buffer, y: Buffer) -> Buffer:
        """``x * y`` of equal shapes."""
        return self.act_mul(x, y, "identity")

    def gate_rows(self, x: Buffer, gate: Buffer) -> Buffer:
        """``x * sigmoid(gate)``, ``gate`` one value per row."""
        if gate.width != 1 or gate.rows is not x.rows:
            raise self._error(f"{gate.name} must have one value for each row of {x.name}")
        out = self._buffer(x.width, x.rows, f"{x.name}.gated")
        self._ops.append(ir.GateRows(x, gate, out))
        return out

    def activation(self, x: Buffer) -> Buffer:
        """``hidden_act(x)``."""
        out = self._buffer(x.width, x.rows, f"{x.name}.act")
        self._ops.append(ir.Activation(x, out, self._activation()))
        return out

    def add(self, x: Buffer, y: Buffer) -> Buffer:
        """``x + y`` of equal shapes."""
        self._same_shape(x, y)
        out = self._buffer(x.width, x.rows, f"{y.name}.sum")
        self._ops.append(ir.Add(x, y, out))
        return out

    def concat(self, x: Buffer, y: Buffer) -> Buffer:
        """Values of ``y`` behind those of ``x``."""
        if x.rows is not y.rows:
            raise self._error(f"{x.name} and {y.name} must have the same rows")
        out = self._buffer(x.width + y.width, x.rows, f"{x.name}.concat")
        self._ops.append(ir.Concat(x, y, out))
        return out

    def add_bias(self, x: Buffer, bias: TensorRef) -> Buffer:
        """Add one vector, ``(width,)`` or ``(1, width)``, to every row, in place."""
        if bias.num_elements != x.width:
            raise self._shape_error(bias, f"({x.width},)")
        self._ops.append(ir.AddBias(x, bias))
        return x

    def scale(self, x: Buffer, factor: float) -> Buffer:
        """Multiply by a constant, in place."""
        self._ops.append(ir.Scale(x, factor))
        return x

    def scale_by_position(self, x: Buffer, beta: float, length: int) -> Buffer:
        """``x * (1 + beta * ln(1 + position // length))``, in place."""
        self._needs_token_rows(x, "scale_by_position")
        self._ops.append(ScaleByPosition(x, beta, length))
        return x

    def xielu(self, x: Buffer, name: str) -> Buffer:
        """xIELU with the model's ``{name}.alpha_p``, ``alpha_n``, ``beta`` and ``eps``."""
        parts = ("alpha_p", "alpha_n", "beta", "eps")
        numbers = [self._vector(f"{name}.{part}", 1) for part in parts]
        out = self._buffer(x.width, x.rows, name)
        self._ops.append(Xielu(x, out, *numbers))
        return out

    def scale_by_weight(self, x: Buffer, name: str) -> Buffer:
        """Multiply by the model's ``{name}.weight``, one value or one per column, in place."""
        weight = self.weight(f"{name}.weight")
        if weight.shape not in ((1,), (x.width,)):
            raise self._shape_error(weight, f"(1,) or ({x.width},)")
        self._ops.append(ir.ScaleByWeight(x, weight))
        return x

    # ---- several residual streams ------------------------------------------------------------

    def add_scaled(
        self,
        x: Buffer,
        y: Buffer,
        coefs: Buffer,
        column: int,
        *,
        offset: float = 0.0,
        factor: float = 1.0,
    ) -> Buffer:
        """``x + factor * (coefs[:, column] + offset) * y``."""
        self._same_shape(x, y)
        if coefs.rows is not x.rows or not 0 <= column < coefs.width:
            raise self._error(f"{coefs.name} of width {coefs.width} has no column {column}")
        out = self._buffer(x.width, x.rows, f"{x.name}.mixed")
        self._ops.append(AddScaled(x, y, coefs, out, column, offset, factor))
        return out

    def match_magnitude(self, x: Buffer, target: Buffer) -> Buffer:
        """Make each row as long as that of ``target``, in place."""
        self._same_shape(x, target)
        self._ops.append(MatchMagnitude(x, target))
        return x

    def keep_largest(self, x: Buffer, deviations: float) -> Buffer:
        """What exceeds the row's mean by more than so many standard deviations, in place."""
        self._ops.append(KeepLargest(x, deviations))
        return x

    def softcap(self, x: Buffer, cap: float) -> Buffer:
        """``cap * tanh(x / cap)``, in place."""
        if cap <= 0:
            raise self._error(f"softcap is {cap}; it must be positive")
        self._ops.append(ir.Softcap(x, cap))
        return x

    def gather_rows(self, x: Buffer) -> Buffer:
        """The rows whose logits are wanted, ``[num_logits, width]``."""
        self._needs_token_rows(x, "gather_rows")
        out = self._buffer(x.width, Rows.LOGITS, f"{x.name}.gathered")
        self._ops.append(ir.GatherRows(x, out))
        return out
