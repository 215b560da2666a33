"""Golden logits of the tiny models of `tests.models.gated_delta`, by `transformers`.

    python -m tests.data.make.make_gated_delta

Needs PyTorch and transformers 5.24; run it in the repository's root.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

from tests.models.gated_delta import CASES, write_checkpoint
from tests.models.tiny import tiny_token_ids

CLASSES = {
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}


def logits_of(folder: Path, model_type: str) -> np.ndarray:
    """Logits of the tiny prompt, ``[num_tokens, vocab_size]``."""
    model = getattr(transformers, CLASSES[model_type]).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return (
            model.eval()(torch.from_numpy(tiny_token_ids().astype(np.int64))[None])
            .logits[0]
            .numpy()
        )


def main() -> None:
    stored = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, model_type in CASES.items():
            folder = write_checkpoint(Path(temporary) / name, name)
            stored[name] = logits_of(folder, model_type)
            print(name, stored[name].shape, "std", stored[name].std())
    path = Path("tests/data/gated_delta.npz")
    np.savez_compressed(path, **stored)
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
