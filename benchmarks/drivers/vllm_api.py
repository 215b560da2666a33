"""Engines with vLLM's offline API: tellin and vLLM itself; the first argument names the package.

Both are driven through their public classes: `LLM`, then ``add_request`` and ``step`` of its
engine, with token ids in and token ids out, so scheduling and greedy sampling are part of every
figure. Clocks start and stop at the outputs of a step: a decode rate counts the tokens between the
step that gave every stream its first token and the step in which the first stream ended.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.cases import PROMPT_LEN
from benchmarks.drivers.base import CHAT, PLAIN_TEXT, Driver, main, random_tokens

VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "HF_HUB_OFFLINE": "1",
}


class VllmApiDriver(Driver):
    def __init__(self, package: str) -> None:
        self.name = package
        if package == "vllm":
            for name, value in VLLM_ENVIRONMENT.items():
                os.environ.setdefault(name, value)
        self._package = importlib.import_module(package)
        self._llm: Any = None
        self._num_requests = 0

    def info(self) -> dict[str, Any]:
        return {"version": getattr(self._package, "__version__", "unknown")}

    def _arguments(self, model: str, options: dict[str, Any]) -> dict[str, Any]:
        arguments = {
            "model": model,
            "max_model_len": options["max_model_len"],
            "max_num_seqs": options["max_num_seqs"],
            "max_num_batched_tokens": 2048,
        }
        if self.name == "tellin":
            arguments["num_threads"] = options["num_threads"]
        else:
            arguments["dtype"] = options["dtype"]
        return arguments

    def load(self, model: str, options: dict[str, Any]) -> dict[str, Any]:
        started = time.perf_counter()
        self._llm = self._package.LLM(**self._arguments(model, options))
        seconds = time.perf_counter() - started
        self._vocab_size = options["vocab_size"]
        return {"seconds": seconds}

    def unload(self) -> dict[str, Any]:
        if hasattr(self._llm, "shutdown"):
            self._llm.shutdown()
        self._llm = None
        gc.collect()
        return {}

    def prepare(self, case: dict[str, Any]) -> dict[str, Any]:
        self.measure(dict(case, steps=min(case["steps"], 8)), seed=0)
        return {}

    def measure(self, case: dict[str, Any], seed: int) -> dict[str, Any]:
        if case["kind"] == "prefill":
            prompt = random_tokens(case["num_tokens"], self._vocab_size, 1_000_000 + seed)
            started = time.perf_counter()
            self._run([prompt], max_tokens=1)
            return {"seconds": time.perf_counter() - started, "tokens": case["num_tokens"]}
        if case["kind"] == "decode":
            # The same context in every round: all but the first take it from the prefix cache.
            length = max(1, case["context"])
            return self._run([random_tokens(length, self._vocab_size, seed=0)], case["steps"] + 1)
        prompts = [
            random_tokens(PROMPT_LEN, self._vocab_size, seed=1000 * seed + i)
            for i in range(case["streams"])
        ]
        return self._run(prompts, case["steps"] + 1)

    def _run(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """Run all prompts together; the decode phase's seconds and tokens."""
        params = self._package.SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        engine = self._llm.llm_engine
        for prompt in prompts:
            self._num_requests += 1
            engine.add_request(str(self._num_requests), {"prompt_token_ids": prompt}, params)
        lengths: dict[str, int] = {}
        started = ended = 0.0
        first = last = 0
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                lengths[output.request_id] = len(output.outputs[0].token_ids)
            if len(lengths) < len(prompts) or not min(lengths.values()):
                continue
            if not started:
                started, first = now, sum(lengths.values())
            elif not ended:
                last = sum(lengths.values())
                if any(output.finished for output in outputs):
                    ended = now
        return {"seconds": ended - started, "tokens": last - first}

    def first_token(self, model: str, report: Callable[..., None]) -> None:
        llm = self._package.LLM(model=model, max_model_len=2048)
        report("loaded")
        is_chat = llm.get_tokenizer().chat_template is not None
        params = self._package.SamplingParams(temperature=0.0, max_tokens=1)
        if hasattr(llm, "stream"):
            next(llm.stream(CHAT if is_chat else PLAIN_TEXT, params))
            report("first_token")
            llm.shutdown()
            return
        if is_chat:
            llm.chat(CHAT, params, use_tqdm=False)
        else:
            llm.generate(PLAIN_TEXT, params, use_tqdm=False)
        report("first_token")


if __name__ == "__main__":
    engine_name = sys.argv.pop(1)
    main(lambda: VllmApiDriver(engine_name))
