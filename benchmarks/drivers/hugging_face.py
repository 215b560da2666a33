"""Transformers on PyTorch: the model in float32 or bfloat16, whichever is faster for the case.

A GGUF file is dequantised by Transformers' own loader. Batched cases use one batch of prompts of
equal length, the best case for it. ``--export GGUF FOLDER`` writes such a file as a safetensors
folder, for engines that read nothing else.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cases import PROMPT_LEN
from benchmarks.drivers.base import CHAT, PLAIN_TEXT, Driver, main, random_tokens


class HuggingFaceDriver(Driver):
    name = "transformers"

    def __init__(self) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        torch.set_grad_enabled(False)
        self._torch = torch
        self._transformers = transformers
        self._models: dict[str, Any] = {}
        self._best: dict[tuple[Any, ...], str] = {}

    def info(self) -> dict[str, Any]:
        return {"version": self._transformers.__version__, "torch": self._torch.__version__}

    def _open(self, auto_class: str, model: str, **options: Any) -> Any:
        path = Path(model)
        cls = getattr(self._transformers, auto_class)
        if path.is_file():
            return cls.from_pretrained(path.parent, gguf_file=path.name, **options)
        return cls.from_pretrained(path, **options)

    def load(self, model: str, options: dict[str, Any]) -> dict[str, Any]:
        if options["num_threads"]:
            self._torch.set_num_threads(options["num_threads"])
        started = time.perf_counter()
        base = self._open("AutoModelForCausalLM", model, dtype=self._torch.float32).eval()
        seconds = time.perf_counter() - started
        self._vocab_size = options["vocab_size"]
        self._models = {"float32": base}
        if options.get("try_bfloat16", True):
            half = self._open("AutoModelForCausalLM", model, dtype=self._torch.bfloat16).eval()
            self._models["bfloat16"] = half
        return {"seconds": seconds}

    def unload(self) -> dict[str, Any]:
        self._models.clear()
        self._best.clear()
        gc.collect()
        return {}

    def prepare(self, case: dict[str, Any]) -> dict[str, Any]:
        key = (case["kind"], case["num_tokens"], case["context"], case["streams"])
        if key not in self._best:
            short = dict(case, steps=min(case["steps"], 4))
            timed = {}
            for dtype in self._models:
                self._run(short, dtype, seed=0)
                timed[dtype] = self._run(short, dtype, seed=1)
            self._best[key] = min(timed, key=lambda dtype: timed[dtype])
        return {"dtype": self._best[key]}

    def measure(self, case: dict[str, Any], seed: int) -> dict[str, Any]:
        key = (case["kind"], case["num_tokens"], case["context"], case["streams"])
        tokens = case["num_tokens"] or case["steps"] * case["streams"]
        return {"seconds": self._run(case, self._best[key], seed), "tokens": tokens}

    def _ids(self, rows: list[list[int]]) -> Any:
        return self._torch.tensor(rows, dtype=self._torch.long)

    def _run(self, case: dict[str, Any], dtype: str, seed: int) -> float:
        model = self._models[dtype]
        if case["kind"] == "prefill":
            ids = self._ids([random_tokens(case["num_tokens"], self._vocab_size, seed)])
            started = time.perf_counter()
            model(ids, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)
            return time.perf_counter() - started
        if case["kind"] == "decode":
            prompts = [random_tokens(max(1, case["context"]), self._vocab_size, seed=0)]
        else:
            prompts = [
                random_tokens(PROMPT_LEN, self._vocab_size, seed=i) for i in range(case["streams"])
            ]
        output = model(self._ids(prompts), use_cache=True, logits_to_keep=1)
        cache, ids = output.past_key_values, output.logits[:, -1:].argmax(-1)
        started = time.perf_counter()
        for _ in range(case["steps"]):
            output = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            ids = output.logits[:, -1:].argmax(-1)
        return time.perf_counter() - started

    def export(self, model: str, folder: str) -> None:
        """Write weights (bfloat16) and tokenizer as a safetensors folder."""
        network = self._open("AutoModelForCausalLM", model, dtype=self._torch.bfloat16)
        # What was loaded is plain bfloat16, though it remembers the file it came from.
        network.hf_quantizer = None
        if hasattr(network.config, "quantization_config"):
            del network.config.quantization_config
        network.save_pretrained(folder)
        self._open("AutoTokenizer", model).save_pretrained(folder)

    def first_token(self, model: str, report: Callable[..., None]) -> None:
        tokenizer = self._open("AutoTokenizer", model)
        network = self._open("AutoModelForCausalLM", model, dtype=self._torch.float32).eval()
        report("loaded")
        if tokenizer.chat_template is None:
            inputs = tokenizer(PLAIN_TEXT, return_tensors="pt")
        else:
            inputs = tokenizer.apply_chat_template(
                CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        network.generate(**inputs, max_new_tokens=1, do_sample=False)
        report("first_token")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--export"]:
        HuggingFaceDriver().export(*sys.argv[2:])
    else:
        main(HuggingFaceDriver)
