"""The benchmarks' model with a layer of its own: its drafts are right as often as is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.synthetic_predictor import (
    CHANCES,
    CIRCLE,
    TINY,
    circle_prompt,
    successor,
    write_predictor,
)
from tellin import LLM, SamplingParams


def test_drafts_are_right_as_often_as_is_wanted(tmp_path: Path) -> None:
    path = write_predictor(tmp_path / "model", TINY)
    spec = {"method": "mtp", "num_speculative_tokens": 1, "adaptive": False}
    params = SamplingParams(temperature=0, max_tokens=4 * CIRCLE)
    options = {"max_model_len": 512, "num_kv_blocks": 64, "num_threads": 1}
    with LLM(
        path, skip_tokenizer_init=True, speculative_config=spec, disable_log_stats=False, **options
    ) as llm:
        counts = (0, 0)
        for chance in CHANCES:
            ids = circle_prompt(chance, 3)
            (output,) = llm.generate({"prompt_token_ids": ids}, params)
            for token in output.outputs[0].token_ids:
                ids.append(successor(ids[-1]))
                assert token == ids[-1]
            values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
            before, counts = counts, tuple(
                int(values[f"tellin:spec_decode_num_{kind}_tokens"])
                for kind in ("draft", "accepted")
            )  # fmt: skip
            num_drafts, num_right = (new - old for new, old in zip(counts, before, strict=True))
            assert num_right / num_drafts == pytest.approx(chance, abs=0.12)
