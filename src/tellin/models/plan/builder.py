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
from tellin.models.plan.ir import Buffer, Rows
from tellin.models.plan.recorder import GATED_ACTIVATIONS
from tellin.models.plan.recurrent_builder import RecurrentBuilder


class PlanBuilder(RecurrentBuilder):
    """Records a `Plan` from ``source``, to run contexts of up to ``max_model_len`` tokens.

    With ``pooling`` the plan ends with the hidden states: a model's head need not be there.

    Methods take and return buffers; ``name`` arguments are tensor names without ``.weight`` and
    ``.bias``, and also name the buffer that is made.

    Raises (every method): `ModelLoadError` when a tensor is missing or does not fit, with its name
    and both shapes.
    """

    # ---- from token ids ----------------------------------------------------------------------

    def embed(self, name: str, scale: float = 1.0) -> Buffer:
        """Token embedding, ``[num_tokens, hidden_size]``."""
        weight = self._matrix(f"{name}.weight", self.hparams.hidden_size)
        if weight.shape[0] != self.hparams.vocab_size:
            raise self._error(
                f"tensor {weight.name!r} has {weight.shape[0]} rows; "
                f"vocab_size is {self.hparams.vocab_size}"
            )
        out = self._buffer(weight.shape[1], Rows.TOKENS, name)
        self._ops.append(ir.Embed(weight, out, scale))
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
    ) -> Buffer:
        """RMSNorm of each row, or of each group of ``group`` values (per-head norm).

        Groups have one weight unless not ``shared``: then each has its part of a wide one.
        ``weight_offset``: added to the weight; None = what the model adds to all its norms'.
        """
        if group is not None and x.width % group:
            raise self._error(f"{x.name} has width {x.width}, not a multiple of group {group}")
        size = group if group is not None and shared else x.width
        weight = self._vector(f"{name}.weight", size)
        out = self._buffer(x.width, x.rows, name)
        hp = self.hparams
        offset = hp.norm_weight_offset if weight_offset is None else weight_offset
        self._ops.append(ir.RmsNorm(x, weight, out, hp.norm_eps, weight_offset=offset, group=group))
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
    ) -> Buffer:
        """Mixture of experts: the ``top_k`` experts of ``router``'s logits, by their softmax.

        ``router`` ``[rows, num_experts]``; expert e is the gated MLP ``{name}.experts.{e}``.
        ``normalize``: the chosen experts' shares add up to 1. Their matrices have biases if the
        first one's has, or ``needs_biases``. ``scoring`` and ``scale`` are those of `ir.Experts`;
        ``selection_bias`` is the name of a vector.
        """
        count = router.width
        bias = None if selection_bias is None else self._vector(selection_bias, count)
        if x.rows is not router.rows:
            raise self._error(f"{x.name} and {router.name} must have the same rows")
        if count > MAX_EXPERTS or not 1 <= top_k <= min(MAX_EXPERTS_PER_TOKEN, count):
            raise UnsupportedModelError(
                f"{self.source.path}: {top_k} of {count} experts per token in {name}; supported "
                f"are up to {MAX_EXPERTS} experts, of which a token uses 1 to "
                f"{MAX_EXPERTS_PER_TOKEN} and not more than there are"
            )
        gate = self._stack(f"{name}.experts", "gate_proj", count, x.width)
        up = self._stack(f"{name}.experts", "up_proj", count, x.width)
        if up[0].shape != gate[0].shape:
            raise self._shape_error(up[0], str(gate[0].shape))
        down = self._stack(f"{name}.experts", "down_proj", count, gate[0].shape[0])
        out = self._buffer(down[0].shape[0], x.rows, f"{name}.experts")
        gate_bias, up_bias, down_bias = (
            self._biases(f"{name}.experts", part, stack, needs_biases)
            for part, stack in (("gate_proj", gate), ("up_proj", up), ("down_proj", down))
        )
        if not len(gate_bias) == len(up_bias) == len(down_bias):
            raise self._error(f"{name}: some matrices of the experts have biases, others none")
        self._ops.append(
            ir.Experts(
                x, router, gate, up, down, out, self._activation(GATED_ACTIVATIONS), top_k,
                normalize, gate_bias, up_bias, down_bias, scoring, bias, scale,
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

    def rope(self, x: Buffer, table: ir.RotaryTable) -> Buffer:
        """Rotate every head of ``x`` in place."""
        self._needs_token_rows(x, "rope")
        hp = self.hparams
        if x.width % hp.head_dim or 2 * len(table.inv_freq) > hp.head_dim:
            raise self._error(
                f"cannot rotate {2 * len(table.inv_freq)} dimensions of heads of {hp.head_dim} "
                f"in {x.name} of width {x.width}"
            )
        num_heads = x.width // hp.head_dim
        self._ops.append(ir.Rope(x, table, num_heads, hp.head_dim, hp.rope_interleaved))
        return x

    def attention(
        self,
        q: Buffer,
        k: Buffer,
        v: Buffer,
        *,
        name: str,
        sliding_window: int | None = None,
        causal: bool = True,
        has_sinks: bool = False,
    ) -> Buffer:
        """Attention over the request's KV cache; a causal one adds a layer to the cache.

        ``has_sinks``: the model has a score ``{name}.sinks.weight`` per head.
        """
        hp = self.hparams
        for x, count, what in (
            (q, hp.num_attention_heads, "num_attention_heads"),
            (k, hp.num_key_value_heads, "num_key_value_heads"),
            (v, hp.num_key_value_heads, "num_key_value_heads"),
        ):
            self._needs_token_rows(x, "attention")
            if x.width != count * hp.head_dim:
                raise self._error(
                    f"{x.name} has {x.width} outputs; {what} * head_dim is "
                    f"{count} * {hp.head_dim} = {count * hp.head_dim}"
                )
        if hp.num_attention_heads % hp.num_key_value_heads:
            raise self._error(
                f"num_attention_heads {hp.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {hp.num_key_value_heads}"
            )
        layer = -1
        if causal:
            layer = len(self._kv_layers)
            self._kv_layers.append(
                ir.KVCacheLayer(hp.num_key_value_heads, hp.head_dim, sliding_window)
            )
        out = self._buffer(q.width, Rows.TOKENS, name)
        scale = hp.head_dim**-0.5 if hp.attention_scale is None else hp.attention_scale
        heads = hp.num_attention_heads
        sinks = self._vector(f"{name}.sinks.weight", heads) if has_sinks else None
        self._ops.append(
            ir.Attention(
                q, k, v, out, layer, heads, hp.num_key_value_heads, hp.head_dim,
                scale, sliding_window, hp.attn_logit_softcapping, causal, sinks,
            )
        )  # fmt: skip
        return out

    # ---- elementwise -------------------------------------------------------------------------

    def act_mul(self, gate: Buffer, up: Buffer, act: str | None = None) -> Buffer:
        """``act(gate) * up``; None = ``hidden_act``."""
        self._same_shape(gate, up)
        out = self._buffer(gate.width, gate.rows, f"{gate.name}.act_mul")
        self._ops.append(ir.ActMul(gate, up, out, self._activation(GATED_ACTIVATIONS, act)))
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
