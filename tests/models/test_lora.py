"""LoRA in the plan and in both backends: rules 7.2.4, 7.3.3, 7.4.2, promise 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tellin.kernels import _C
from tellin.kernels.adapters import smallest_tensor
from tellin.kernels.batch import StepBatch
from tellin.kernels.native import NativeBackend
from tellin.kernels.reference import ReferenceBackend
from tellin.loading.dequantize import dequantize
from tellin.loading.tensors import QuantType, TensorRef
from tellin.models import build_plan
from tellin.models.plan import ir
from tellin.models.plan.listing import format_plan
from tests.models.adapters import Pairs, base_weights, merged
from tests.models.stepping import Stepper, logits_of
from tests.models.tiny import (
    ALL_CASES,
    BASE,
    MAX_MODEL_LEN,
    memory_source,
    tiny_arrays,
    tiny_source,
    tiny_token_ids,
)

MAX_RANK = 16
FLOAT32 = {"kv_cache_dtype": "float32"}


def plan_of(name: str, **options: Any) -> ir.Plan:
    return build_plan(tiny_source(name), max_model_len=MAX_MODEL_LEN.get(name), **options)


def random_adapter(plan: ir.Plan, rank: int, seed: int, only: str = "") -> Pairs:
    random = np.random.RandomState(seed)
    return {
        site: (
            (random.standard_normal((rank, n)) / np.sqrt(n)).astype(np.float32),
            (0.3 * random.standard_normal((m, rank)) / np.sqrt(rank)).astype(np.float32),
        )
        for site, (n, m) in plan.lora_sites.items()
        if only in site
    }


def adapters_of(plan: ir.Plan) -> list[Pairs]:
    """Of several ranks; the second leaves sites out."""
    return [
        random_adapter(plan, 16, 1),
        random_adapter(plan, 5, 2, only="self_attn"),
        random_adapter(plan, 1, 3),
    ]


def run_prompts(
    backend: Any, slots: Sequence[int] | None, ids: Sequence[Sequence[int]], wanted: Any = None
) -> list[np.ndarray]:
    """Logits of whole prompts, one after the other in one step; of all positions, or of some."""
    size = backend.block_size
    lens = np.array([len(prompt) for prompt in ids], np.int32)
    starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    width = -(-int(lens.max()) // size)
    table = 1 + np.arange(len(ids) * width, dtype=np.int32).reshape(len(ids), width)
    backend.init_kv_cache(int(table.max()) + 1)
    rows = [np.arange(n) if wanted is None else np.array(wanted) % n for n in lens]
    logits = np.array(
        backend.forward(
            StepBatch(
                token_ids=np.concatenate(ids).astype(np.int32),
                positions=np.concatenate([np.arange(n) for n in lens]).astype(np.int32),
                query_start_loc=starts,
                seq_lens=lens,
                block_table=table,
                logits_indices=np.concatenate(
                    [start + r for start, r in zip(starts, rows, strict=False)]
                ).astype(np.int32),
                adapter_slots=None if slots is None else np.array(slots, np.int32),
            )
        )
    )
    if len(logits) == sum(lens):  # an encoder has a row per token
        rows = [np.arange(n) for n in lens]
    return np.split(logits, np.cumsum([len(r) for r in rows])[:-1])


# ---------------------------------------------------------------------- the plan


def test_sites_are_the_linear_layers_of_every_layer() -> None:
    sites = plan_of("llama", max_lora_rank=8).lora_sites
    assert len(sites) == 7 * BASE.num_hidden_layers
    assert sites["layers.1.mlp.down_proj"] == (BASE.intermediate_size, BASE.hidden_size)
    assert sites["layers.0.self_attn.k_proj"] == (64, 32)
    assert plan_of("llama").lora_sites == {}


def test_the_fused_plan_has_one_operation_per_input() -> None:
    plan = plan_of("llama", max_lora_rank=8)
    loras = [op for op in plan.ops if isinstance(op, ir.Lora)]
    assert len(loras) == 4 * BASE.num_hidden_layers  # q/k/v, o, gate/up, down
    assert [len(op.parts) for op in loras[:4]] == [3, 1, 2, 1]
    listing = format_plan(plan)
    assert "lora" in listing
    assert "b2 + B1 (A1 b1)" in listing


def test_logit_rows_are_gathered_before_they_are_used() -> None:
    """All gathers come before the first operation on logit rows, so long steps run in passes."""
    for name in ALL_CASES:
        ops = plan_of(name, max_lora_rank=8).ops
        gathers = [i for i, op in enumerate(ops) if isinstance(op, ir.GatherRows)]
        logit = [
            i
            for i, op in enumerate(ops)
            if not isinstance(op, ir.GatherRows) and op.writes[0].rows is ir.Rows.LOGITS
        ]
        assert not gathers or max(gathers) < min(logit)


# ---------------------------------------------------------------------- values


@pytest.mark.parametrize("name", ALL_CASES)
def test_values_are_those_of_merged_weights(name: str) -> None:
    """y = W x + B A x, on every architecture, in both backends, for each request its own."""
    plan, ids = plan_of(name, max_lora_rank=MAX_RANK), tiny_token_ids()
    adapters = adapters_of(plan)
    reference = ReferenceBackend(plan)
    native = NativeBackend(plan, **FLOAT32)
    for slot, pairs in enumerate(adapters):
        reference.set_adapter(slot, pairs)
        native.set_adapter(slot, pairs)
    slots = [1, -1, 0, 2]
    mixed = run_prompts(reference, slots, [ids] * 4)
    np.testing.assert_allclose(run_prompts(native, slots, [ids] * 4), mixed, rtol=0, atol=2e-4)
    for slot, logits in zip(slots, mixed, strict=True):
        arrays = tiny_arrays(name)
        if slot >= 0:
            scaled = {k: (a, b / 2) for k, (a, b) in adapters[slot].items()}  # alpha is 2 r
            arrays = merged(arrays, scaled)
        source = memory_source(ALL_CASES[name], arrays)
        own = ReferenceBackend(build_plan(source, max_model_len=MAX_MODEL_LEN.get(name)))
        np.testing.assert_allclose(logits, logits_of(own, ids), rtol=0, atol=2e-4)


def rounded(array: np.ndarray, kind: str) -> np.ndarray:
    if kind == "f16":
        return array.astype(np.float16).astype(np.float32)
    if kind == "bf16":
        return (array.view(np.uint32) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return array


@pytest.mark.parametrize("kind", ["f32", "bf16", "f16"])
def test_matrices_keep_their_values_in_the_smallest_type(kind: str) -> None:
    array = np.random.RandomState(1).standard_normal((5, 12)).astype(np.float32)
    array[0, :4] = (0.0, -0.0, 1.0, 2.0**-14)
    array = rounded(array, kind)
    number, data, rows, columns = smallest_tensor(array)
    quant_type = QuantType(number)
    assert quant_type.name == kind.upper()
    stored = dequantize(TensorRef("a", (rows, columns), quant_type, data))
    np.testing.assert_array_equal(stored, array)


def test_values_beyond_16_bits_stay_float32() -> None:
    for value in (65536.0 * 1.001, 1e-8, 1 + 2**-12):
        assert smallest_tensor(np.full((2, 2), value, np.float32))[0] == QuantType.F32


@pytest.mark.parametrize("isa", _C.linear_variants())
@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_adapters_of_16_bits(kind: str, isa: str) -> None:
    plan, ids = plan_of("llama", max_lora_rank=MAX_RANK), tiny_token_ids()
    backends = [NativeBackend(plan, isa=isa, **FLOAT32), ReferenceBackend(plan)]
    for backend in backends:
        for slot, pairs in enumerate(adapters_of(plan)):
            small = {k: (rounded(a, kind), rounded(b, kind)) for k, (a, b) in pairs.items()}
            backend.set_adapter(slot, small)
    native, reference = (run_prompts(b, [0, 1, -1, 2], [ids] * 4) for b in backends)
    np.testing.assert_allclose(native, reference, rtol=0, atol=2e-4)
    for slot, together in zip([0, 1, -1, 2], native, strict=True):
        assert (run_prompts(backends[0], [slot], [ids])[0] == together).all()


def test_gguf_order_of_rows_means_the_same(tmp_path: Any) -> None:
    """An adapter gives the same model on a checkpoint and on its GGUF file (7.2.5)."""
    from tellin.loading.lora import load_adapter
    from tests.models.adapters import adapter_pairs, write_adapter

    folder = write_adapter(tmp_path, adapter_pairs(8, 5, hparams=BASE, size=0.3))
    arrays = base_weights(BASE)
    interleaved = dict(arrays)
    for name, array in arrays.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            halves = array.reshape(-1, 2, BASE.head_dim // 2, array.shape[1])
            interleaved[name] = halves.swapaxes(1, 2).reshape(array.shape)
    logits = []
    for hparams, weights in (
        (BASE, arrays),
        (replace(BASE, rope_interleaved=True), interleaved),
    ):
        plan = build_plan(memory_source(hparams, weights), max_lora_rank=8)
        backend = NativeBackend(plan, **FLOAT32)
        backend.set_adapter(0, load_adapter(folder, hparams, plan.lora_sites, 8).weights)
        logits.append(run_prompts(backend, [0], [tiny_token_ids()])[0])
        logits.append(run_prompts(backend, None, [tiny_token_ids()])[0])
    np.testing.assert_allclose(logits[0], logits[2], rtol=0, atol=1e-4)
    np.testing.assert_allclose(logits[1], logits[3], rtol=0, atol=1e-4)
    assert np.abs(logits[0] - logits[1]).max() > 0.1


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama_biases", "qwen2moe"])
def test_7_3_3_without_an_adapter_no_bit_changes(name: str) -> None:
    """With adapters loaded or not, rows without one are those of a plan without LoRA."""
    ids = [tiny_token_ids(), tiny_token_ids(7)]
    for kind in (NativeBackend, ReferenceBackend):
        plain = run_prompts(kind(plan_of(name)), None, ids)
        plan = plan_of(name, max_lora_rank=MAX_RANK)
        backend = kind(plan)
        for slots in (None, [-1, -1], [-1, 0]):
            if slots == [-1, 0]:
                backend.set_adapter(0, random_adapter(plan, 4, 1))
            assert (run_prompts(backend, slots, ids)[0] == plain[0]).all()


# ---------------------------------------------------------------------- promise 1


@pytest.fixture(scope="module")
def long_plan() -> ir.Plan:
    """Room for prompts of several passes; widths that are no multiple of a tile's."""
    hparams = replace(BASE, max_position_embeddings=2048, intermediate_size=1100)
    return build_plan(memory_source(hparams, base_weights(hparams)), max_lora_rank=MAX_RANK)


PROMPTS = [np.arange(n) * 7 % 64 for n in (3, 700, 1, 530, 60, 49, 130)]
SLOTS = [0, 1, 1, -1, 2, 2, 0]


@pytest.mark.parametrize("isa", _C.linear_variants())
def test_promise_1_alone_or_beside_others(long_plan: ir.Plan, isa: str) -> None:
    """Long prompts of several adapters in passes, against each alone; any number of threads."""
    results = []
    for num_threads in (1, 3):
        backend = NativeBackend(long_plan, isa=isa, num_threads=num_threads)
        for slot, pairs in enumerate(adapters_of(long_plan)):
            backend.set_adapter(slot, pairs)
        results.append(run_prompts(backend, SLOTS, PROMPTS, wanted=[0, -1, 47]))
    for together, other in zip(*results, strict=True):
        assert (together == other).all()
    for i in (0, 1, 4, 6):
        (alone,) = run_prompts(backend, [SLOTS[i]], [PROMPTS[i]], wanted=[0, -1, 47])
        assert (alone == results[0][i]).all()
    order = [3, 6, 5, 0, 2, 1, 4]
    shuffled = run_prompts(
        backend, [SLOTS[i] for i in order], [PROMPTS[i] for i in order], wanted=[0, -1, 47]
    )
    for i, logits in zip(order, shuffled, strict=True):
        assert (logits == results[0][i]).all()


def test_long_prompts_against_the_reference(long_plan: ir.Plan) -> None:
    options: dict[Any, dict[str, Any]] = {
        NativeBackend: FLOAT32,
        ReferenceBackend: {"batched": True},
    }
    results = []
    for kind, values in options.items():
        backend = kind(long_plan, **values)
        for slot, pairs in enumerate(adapters_of(long_plan)):
            backend.set_adapter(slot, pairs)
        results.append(run_prompts(backend, SLOTS[:3], PROMPTS[:3], wanted=[-1]))
    for native, reference in zip(*results, strict=True):
        np.testing.assert_allclose(native, reference, rtol=0, atol=5e-4)


class _Adapted(Stepper):
    """Steps whose requests have adapters by name."""

    def __init__(self, backend: Any, slots: dict[str, int]) -> None:
        super().__init__(backend)
        forward: Callable[[StepBatch], Any] = backend.forward
        names: list[str] = []
        self.names = names

        def with_slots(batch: StepBatch) -> Any:
            chosen = np.array([slots[name] for name in names], np.int32)
            return forward(replace(batch, adapter_slots=chosen))

        self.backend = SimpleNamespace(
            block_size=backend.block_size, plan=backend.plan, forward=with_slots
        )

    def step(self, work: Any) -> list[np.ndarray]:
        self.names[:] = [name for name, _ in work]
        return super().step(work)


def test_promise_1_chunks_and_decodes() -> None:
    plan = plan_of("llama", max_lora_rank=MAX_RANK)
    backend = NativeBackend(plan)
    for slot, pairs in enumerate(adapters_of(plan)):
        backend.set_adapter(slot, pairs)
    ids = [int(i) for i in tiny_token_ids()]
    whole = _Adapted(backend, {"a": 0}).step([("a", ids)])[0]
    stepper = _Adapted(backend, {"a": 0, "b": 1, "c": -1})
    rows = [
        stepper.step([("b", ids[:3]), ("a", ids[:5])])[1],
        stepper.step([("a", ids[5:6]), ("c", ids[:9]), ("b", ids[3:4])])[0],
        stepper.step([("a", ids[6:])])[0],
    ]
    assert (np.concatenate(rows) == whole).all()


# ---------------------------------------------------------------------- slots


def test_a_slot_holds_nothing_of_the_one_before() -> None:
    """7.3.2: modules absent in the adapter are not those of the previous tenant."""
    plan = plan_of("llama", max_lora_rank=MAX_RANK)
    full, part = random_adapter(plan, 8, 1), random_adapter(plan, 8, 2, only="q_proj")
    backend, fresh = NativeBackend(plan), NativeBackend(plan)
    backend.set_adapter(0, full)
    before = run_prompts(backend, [0], [tiny_token_ids()])[0]
    backend.set_adapter(0, part)
    fresh.set_adapter(0, part)
    after = run_prompts(backend, [0], [tiny_token_ids()])[0]
    assert (after == run_prompts(fresh, [0], [tiny_token_ids()])[0]).all()
    assert not (after == before).all()


def test_bad_slots_and_matrices_are_refused() -> None:
    plan = plan_of("llama", max_lora_rank=4)
    backend = NativeBackend(plan)
    pairs = random_adapter(plan, 4, 1)
    with pytest.raises(ValueError, match="empty slot"):
        run_prompts(backend, [0], [tiny_token_ids()])
    with pytest.raises(ValueError, match="the largest is 4"):
        backend.set_adapter(0, random_adapter(plan, 5, 1))
    with pytest.raises(ValueError, match="slots"):
        backend.set_adapter(-1, pairs)
    with pytest.raises(KeyError):
        backend.set_adapter(0, {"layers.0.nothing": next(iter(pairs.values()))})
    a, b = pairs["layers.0.mlp.up_proj"]
    with pytest.raises(ValueError, match="fit"):
        backend.set_adapter(0, {"layers.0.mlp.down_proj": (a, b)})
    with pytest.raises(ValueError, match="ranks"):
        backend.set_adapter(0, {"layers.0.mlp.up_proj": (a[:2], b)})
    backend.set_adapter(0, pairs)
    run_prompts(backend, [0], [tiny_token_ids()])
    backend.clear_adapter(0)
    backend.clear_adapter(77)
    with pytest.raises(ValueError, match="empty slot"):
        run_prompts(backend, [0], [tiny_token_ids()])
    with pytest.raises(ValueError, match="as many entries"):
        run_prompts(backend, [0, 0], [tiny_token_ids()])
