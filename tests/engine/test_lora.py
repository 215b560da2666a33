"""LoRA from `LLM.generate` to the tokens: rules 7.1 to 7.4, P50, B20, promise 1, all clients."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tellin import LLM, EngineArgs, LLMEngine, LoRARequest, RequestOutput, SamplingParams
from tellin.config import LoRAConfig
from tellin.engine.arg_utils import create_engine_config
from tellin.engine.async_llm import AsyncLLM
from tellin.exceptions import (
    AdapterError,
    AdapterNotFoundError,
    InvalidParameterError,
    InvalidTypeError,
    RequestError,
    UnsupportedFeatureError,
)
from tests.models.adapters import (
    adapter_pairs,
    base_weights,
    merged,
    smollm2_adapters,
    write_adapter,
    write_llama_folder,
)

DATA = Path(__file__).parents[1] / "data"
PARAMS = SamplingParams(temperature=0, max_tokens=12, logprobs=2, ignore_eos=True)
PROMPTS = [
    {"prompt_token_ids": [(i * 7 + j * 3) % 64 for j in range(5 + 13 * i)]} for i in range(6)
]
ORDER = ["a", "b", None, "b", "a", None]
"""Adapter of each prompt."""


@dataclass
class Models:
    """A base model, two adapters, and the same two merged into the weights."""

    root: Path

    def path(self, name: str) -> str:
        return str(self.root / name)

    def lora(self, name: str | None, **changes: Any) -> LoRARequest | None:
        if name is None:
            return None
        values = {
            "lora_name": name,
            "lora_int_id": ord(name) - ord("a") + 1,
            "lora_path": self.path(name),
        }
        return LoRARequest(**(values | changes))

    def args(self, model: str = "base", **changes: Any) -> dict[str, Any]:
        values: dict[str, Any] = {
            "model": self.path(model),
            "skip_tokenizer_init": True,
            "max_model_len": 256,
            "num_kv_blocks": 128,
            "num_threads": 1,
            "kv_cache_dtype": "float32",
        }
        return values | changes


LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 4}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("lora")
    base = base_weights()
    all_layers = adapter_pairs(8, 1, size=0.3)
    attention = adapter_pairs(4, 2, ("q_proj", "v_proj"), size=0.5)
    write_llama_folder(root / "base", base)
    write_llama_folder(root / "merged-a", merged(base, all_layers))
    write_llama_folder(root / "merged-b", merged(base, attention, alpha=6, rs=True))
    write_adapter(root / "a", all_layers)
    write_adapter(root / "b", attention, use_rslora=True, lora_alpha=6)
    write_adapter(root / "c", adapter_pairs(2, 3))
    return Models(root)


def results(outputs: list[RequestOutput]) -> list[Any]:
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


def logprobs_of(result: Any) -> np.ndarray:
    return np.array([[entry.logprob for entry in position.values()] for position in result[1]])


def run(models: Models, loras: Any = None, model: str = "base", **changes: Any) -> list[Any]:
    with LLM(**models.args(model, **changes)) as llm:
        return results(llm.generate(PROMPTS, PARAMS, lora_request=loras))


@pytest.fixture(scope="module")
def mixed(models: Models) -> list[Any]:
    """Every prompt with its adapter, in one batch."""
    return run(models, [models.lora(name) for name in ORDER], **LORA)


# ---------------------------------------------------------------------- values


def test_adapters_are_as_good_as_merged_weights(models: Models, mixed: list[Any]) -> None:
    expected = {
        "a": run(models, model="merged-a"),
        "b": run(models, model="merged-b"),
        None: run(models),
    }
    assert len({str(values[3][0]) for values in expected.values()}) == 3
    for i, name in enumerate(ORDER):
        assert mixed[i][0] == expected[name][i][0]
        np.testing.assert_allclose(
            logprobs_of(mixed[i]), logprobs_of(expected[name][i]), rtol=0, atol=1e-4
        )
        if name is None:  # 7.3.3: the base model's bits
            assert mixed[i] == expected[name][i]


def test_the_reference_backend_agrees(models: Models, mixed: list[Any]) -> None:
    own = run(models, [models.lora(name) for name in ORDER], backend="reference", **LORA)
    for native, reference in zip(mixed, own, strict=True):
        assert native[0] == reference[0]
        np.testing.assert_allclose(logprobs_of(native), logprobs_of(reference), rtol=0, atol=1e-4)


# ---------------------------------------------------------------------- promise 1


def test_promise_1_neighbours_change_no_bit(models: Models, mixed: list[Any]) -> None:
    with LLM(**models.args(**LORA)) as llm:
        for prompt, name, expected in zip(PROMPTS, ORDER, mixed, strict=True):
            alone = llm.generate(prompt, PARAMS, lora_request=models.lora(name))
            assert results(alone) == [expected]


@pytest.mark.parametrize(
    "changes",
    [
        {"max_loras": 1, "max_cpu_loras": 1},  # 7: one after the other, never an error
        {"max_num_batched_tokens": 16, "max_num_seqs": 4, "enable_prefix_caching": False},
        {"num_threads": 2, "num_kv_blocks": 18},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ],
    ids=["one_slot", "chunks", "preemption", "speculation"],
)
def test_promise_1_however_it_is_scheduled(
    models: Models, mixed: list[Any], changes: dict[str, Any]
) -> None:
    loras = [models.lora(name) for name in ORDER]
    changed = {**LORA, **changes}
    assert run(models, loras, **changed) == mixed


def test_prefix_cache_is_kept_apart(models: Models) -> None:
    """2.4.3: one prompt, three sets of weights; a hit serves its own adapter's blocks."""
    prompt = PROMPTS[5]
    with LLM(**models.args(**LORA)) as llm:
        first, second = (
            [llm.generate(prompt, PARAMS, lora_request=models.lora(n))[0] for n in ("a", "b", None)]
            for _ in range(2)
        )
        assert results(first) == results(second)
        assert all(output.num_cached_tokens == 0 for output in first)
        assert all((output.num_cached_tokens or 0) >= 64 for output in second)


def test_wart_a_name_loaded_anew_serves_no_stale_weights(models: Models) -> None:
    """P50: other weights under the same name; nothing cached of the old ones is used."""
    prompt = PROMPTS[5]
    with LLM(**models.args(**LORA)) as llm:
        engine = llm.llm_engine
        expected = results(llm.generate(prompt, PARAMS, lora_request=models.lora("b")))
        before = results(llm.generate(prompt, PARAMS, lora_request=models.lora("a")))
        changed = models.lora("a", lora_path=models.path("b"), load_inplace=True)
        assert changed is not None
        assert engine.add_lora(changed)
        output = llm.generate(prompt, PARAMS, lora_request=changed)
        assert output[0].num_cached_tokens == 0
        assert results(output) == expected != before
        assert engine.remove_lora(1)
        assert results(llm.generate(prompt, PARAMS, lora_request=models.lora("a"))) == before


# ---------------------------------------------------------------------- clients


@pytest.mark.parametrize("kind", ["sync_mp", "async_mp", "async_thread"])
def test_all_clients(models: Models, mixed: list[Any], kind: str) -> None:
    args = EngineArgs.from_dict(models.args(**LORA))
    if kind == "sync_mp":
        with LLM.from_engine(LLMEngine.from_engine_args(args, enable_multiprocessing=True)) as llm:
            outputs = llm.generate(
                PROMPTS, PARAMS, lora_request=[models.lora(name) for name in ORDER]
            )
            assert results(outputs) == mixed
            check_control(llm, models)
        return

    async def main() -> None:
        engine = AsyncLLM.from_engine_args(args, multiprocess_mode=kind == "async_mp")

        async def one(prompt: Any, name: str | None) -> RequestOutput:
            last = None
            rendered = engine.renderer.render_cmpl([prompt])[0]
            stream = engine.generate(rendered, PARAMS, None, lora_request=models.lora(name))
            async for output in stream:
                last = output
            assert last is not None
            return last

        try:
            lora = models.lora("c")
            assert lora is not None
            assert await engine.add_lora(lora)
            assert await engine.list_loras() == {3}
            assert await engine.pin_lora(3)
            assert await engine.remove_lora(3)
            outputs = await asyncio.gather(
                *(one(prompt, name) for prompt, name in zip(PROMPTS, ORDER, strict=True))
            )
            assert [o.outputs[0].token_ids for o in outputs] == [ids for ids, _ in mixed]
            failed = await one(PROMPTS[0], "x")
            assert "no such folder" in str(failed.error)
        finally:
            engine.shutdown()

    asyncio.run(main())


def check_control(llm: LLM, models: Models) -> None:
    engine = llm.llm_engine
    assert engine.list_loras() == {1, 2}
    assert engine.remove_lora(1)
    assert not engine.remove_lora(1)
    assert engine.list_loras() == {2}
    lora = models.lora("c")
    assert lora is not None
    assert engine.add_lora(lora)
    assert engine.pin_lora(3)
    with pytest.raises(AdapterError, match="no loaded"):
        engine.pin_lora(9)
    with pytest.raises(AdapterNotFoundError, match="no such folder"):
        engine.add_lora(LoRARequest("x", 8, "/nowhere"))
    with pytest.raises(RequestError, match="no such folder"):
        llm.generate(PROMPTS[0], PARAMS, lora_request=LoRARequest("x", 8, "/nowhere"))
    assert len(llm.generate(PROMPTS[:2], PARAMS, lora_request=lora)) == 2


def test_control_in_process(models: Models, mixed: list[Any]) -> None:
    with LLM(**models.args(**LORA)) as llm:
        loras = [models.lora(name) for name in ORDER]
        assert results(llm.generate(PROMPTS, PARAMS, lora_request=loras)) == mixed
        check_control(llm, models)


# ---------------------------------------------------------------------- removal while in use


def test_p50_removal_waits_for_requests_in_progress(models: Models, mixed: list[Any]) -> None:
    """It is hidden at once and dropped after its last request, whose tokens do not change."""
    with LLMEngine.from_engine_args(EngineArgs.from_dict(models.args(**LORA))) as engine:
        prompt = engine.renderer.render_cmpl([PROMPTS[0]])[0]
        engine.add_request("x", prompt, PARAMS, lora_request=models.lora("a"))
        engine.step()
        assert engine.remove_lora(1)
        assert engine.list_loras() == set()
        other = LoRARequest("other", 1, models.path("b"))
        with pytest.raises(AdapterError, match="still use it"):
            engine.add_lora(other)
        outputs = [o for o in iter_steps(engine) if o.finished]
        assert results(outputs) == [mixed[0]]
        assert engine.add_lora(other)
        assert engine.list_loras() == {1}


def test_a_new_request_revives_an_adapter_that_is_being_removed(models: Models) -> None:
    with LLMEngine.from_engine_args(EngineArgs.from_dict(models.args(**LORA))) as engine:
        prompt = engine.renderer.render_cmpl([PROMPTS[0]])[0]
        engine.add_request("x", prompt, PARAMS, lora_request=models.lora("a"))
        engine.step()
        assert engine.remove_lora(1)
        engine.add_request("y", prompt, PARAMS, lora_request=models.lora("a"))
        assert engine.list_loras() == {1}
        assert len([o for o in iter_steps(engine) if o.finished]) == 2
        assert engine.list_loras() == {1}


def iter_steps(engine: LLMEngine) -> list[Any]:
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        outputs += engine.step(timeout=60)
    return outputs


def test_more_adapters_than_are_kept(models: Models, mixed: list[Any]) -> None:
    """Requests for all of them at once; what is in use is not dropped, later it is loaded anew."""
    loras = [models.lora(name) for name in ("a", "b", "c", "a", "b", "c")]
    args = models.args(enable_lora=True, max_loras=1, max_cpu_loras=1)
    with LLM(**args) as llm:
        first = results(llm.generate(PROMPTS, PARAMS, lora_request=loras))
        assert first[0] == mixed[0]
        again = llm.generate(PROMPTS[0], PARAMS, lora_request=models.lora("a"))
        assert results(again) == first[:1]
        assert len(llm.llm_engine.list_loras()) == 1


# ---------------------------------------------------------------------- configuration and errors


def test_7_1_2_configuration(models: Models) -> None:
    def config(**values: Any) -> LoRAConfig | None:
        args = EngineArgs.from_dict(models.args(**values))
        return create_engine_config(args).lora_config

    assert config() is None
    assert config(enable_lora=True) == LoRAConfig(16, 1, 1)
    assert config(enable_lora=True, max_loras=3, max_lora_rank=64) == LoRAConfig(64, 3, 3)
    for bad in ({"max_loras": 0}, {"max_lora_rank": 513}, {"max_loras": 3, "max_cpu_loras": 2}):
        with pytest.raises(InvalidParameterError, match=next(iter(reversed(bad)))):
            config(enable_lora=True, **bad)


def test_7_1_3_lora_is_off(models: Models) -> None:
    with LLM(**models.args()) as llm:
        with pytest.raises(
            UnsupportedFeatureError, match="LoRA is disabled; start the engine with"
        ):
            llm.generate(PROMPTS[0], PARAMS, lora_request=models.lora("a"))
        with pytest.raises(UnsupportedFeatureError, match="enable_lora"):
            llm.llm_engine.add_lora(LoRARequest("a", 1, models.path("a")))
        assert len(llm.generate(PROMPTS[0], PARAMS)) == 1


def test_7_1_1_requests() -> None:
    lora = LoRARequest("a", 3, "/a")
    assert (lora.name, lora.adapter_id, lora.path) == ("a", 3, "/a")
    assert lora == LoRARequest("a", 4, "/b")
    assert len({lora, LoRARequest("a", 4, "/b"), LoRARequest("b", 3, "/a")}) == 2
    with pytest.raises(ValueError, match="lora_int_id"):
        LoRARequest("a", 0, "/a")
    with pytest.raises(InvalidParameterError, match="lora_path"):
        LoRARequest("a", 1, "")
    with pytest.raises(InvalidTypeError, match="lora_int_id must be an integer, got '1'"):
        LoRARequest("a", "1", "/a")  # type: ignore[arg-type]


def test_p50_a_bad_adapter_fails_its_request_alone(models: Models, mixed: list[Any]) -> None:
    with LLM(**models.args(**LORA)) as llm:
        loras = [models.lora("a"), LoRARequest("x", 9, "/nowhere"), None]
        outputs = llm.generate(PROMPTS[:3], PARAMS, lora_request=loras, on_error="return")
        assert outputs[0].error is None
        assert isinstance(outputs[1].error, AdapterNotFoundError)
        assert results(outputs[:1] + outputs[2:]) == [mixed[0], mixed[2]]
        with pytest.raises(AdapterNotFoundError):
            llm.generate(PROMPTS[:3], PARAMS, lora_request=loras)
        assert not llm.llm_engine.has_unfinished_requests()


def test_embeddings_with_an_adapter(models: Models) -> None:
    """Pooling and adapters together: as if merged."""
    options = {"runner": "pooling"}
    with LLM(**models.args("merged-a", **options)) as llm:
        expected = [o.outputs.embedding for o in llm.embed(PROMPTS)]
    with LLM(**models.args(**options, **LORA)) as llm:
        own = [o.outputs.embedding for o in llm.embed(PROMPTS, lora_request=models.lora("a"))]
        base = [o.outputs.embedding for o in llm.embed(PROMPTS)]
    np.testing.assert_allclose(own, expected, rtol=0, atol=1e-5)
    assert np.abs(np.array(base) - own).max() > 0.01


def test_profiles_name_the_layers_of_adapters(models: Models, tmp_path: Path) -> None:
    with LLM(**models.args(**LORA)) as llm:
        llm.start_profile(str(tmp_path / "trace"))
        llm.generate(PROMPTS[0], PARAMS, lora_request=models.lora("a"))
        llm.stop_profile()
        operations = llm.collective_rpc("operation_profile")[0]
    seconds = {operation["name"]: operation["seconds"] for operation in operations}
    assert seconds["lora layers.0.self_attn.q_proj/k_proj/v_proj"] > 0
    assert "lora layers.1.mlp.down_proj" in seconds


# ---------------------------------------------------------------------- a real, quantised model


def test_b20_adapters_on_a_quantised_gguf(smollm2_path: Path, tmp_path: Path) -> None:
    """Values of `transformers` with merged weights (tests/data/make/make_lora.py); promise 1."""
    with np.load(DATA / "lora.npz") as stored:
        golden = dict(stored)
    loras: dict[str, LoRARequest | None] = {"base": None}
    for number, (name, pairs) in enumerate(smollm2_adapters().items(), 1):
        path = write_adapter(tmp_path / name, pairs)
        loras[name] = LoRARequest(name, number, str(path))
    prompt = {"prompt_token_ids": golden["ids"].tolist()}
    one = SamplingParams(temperature=0, max_tokens=1, logprobs=10)
    args: dict[str, Any] = {"max_model_len": 128, "num_kv_blocks": 64, **LORA}
    exact = {"activation_precision": "float32", "kv_cache_dtype": "float32"}
    with LLM(smollm2_path, logprobs_mode="raw_logits", **args, **exact) as llm:
        outputs = llm.generate([prompt] * 3, one, lora_request=list(loras.values()))
        for name, output in zip(loras, outputs, strict=True):
            logits = {i: entry.logprob for i, entry in output.outputs[0].logprobs[0].items()}
            expected = dict(
                zip(golden[f"top_ids_{name}"], golden[f"top_logits_{name}"], strict=True)
            )
            assert set(logits) == set(expected)
            for token_id, value in expected.items():
                assert logits[token_id] == pytest.approx(value, abs=2e-3)
    with LLM(smollm2_path, **args) as llm:
        together = results(llm.generate([prompt] * 3, PARAMS, lora_request=list(loras.values())))
        for lora, expected_result in zip(loras.values(), together, strict=True):
            assert results(llm.generate(prompt, PARAMS, lora_request=lora)) == [expected_result]
        assert len({str(result) for result in together}) == 3
