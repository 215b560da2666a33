"""Makes tests/data/classic.npz: what `transformers` computes with tiny classic decoders.

Run it with PyTorch, transformers and safetensors installed, from the repository root:

    python tests/data/make/make_classic.py

Stored per case of tests/models/classic.py: its logits, float32 ``[num_tokens, vocab_size]``; per
classifier ``CASE_scores`` ``[3]``, logits of the whole prompt.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.models.classic import (
    CASES,
    CLASSIFIERS,
    token_ids,
    write_classic,
    write_classifier,
)


def load_case(case: str, folder: Path) -> Any:
    """The model of a case, which is written to ``folder``; all weights are its, and it has all."""
    model, info = AutoModelForCausalLM.from_pretrained(
        write_classic(folder, case),
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    assert not any(info.values()), (case, info)
    return model.eval()


def main() -> None:
    stored = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            model = load_case(case, Path(folder))
            stored[case] = model(torch.from_numpy(token_ids()).long()[None]).logits[0].numpy()
        print(case, stored[case].shape, stored[case].std(), stored[case].ravel()[:3])
    for case in CLASSIFIERS:
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            path = write_classifier(Path(folder), case)
            classifier, info = AutoModelForSequenceClassification.from_pretrained(
                path, dtype=torch.float32, output_loading_info=True
            )
            assert not any(info.values()), (case, info)
            ids = torch.from_numpy(token_ids()).long()[None]
            stored[f"{case}_scores"] = classifier.eval()(ids).logits[0].numpy()
        print(case, stored[f"{case}_scores"])
    np.savez_compressed(Path(__file__).parents[1] / "classic.npz", **stored)


if __name__ == "__main__":
    main()
