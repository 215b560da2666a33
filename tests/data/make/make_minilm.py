"""Makes tests/data/minilm.npz: hidden states that `transformers` computes with all-MiniLM-L6-v2.

Run it with PyTorch and transformers installed, from the repository root:

    python tests/data/make/make_minilm.py PATH/OF/THE/FOLDER

Stored per sentence i: ``ids_i`` (token ids) and ``mean_i`` (mean of the last hidden states over the
tokens, float32 ``[384]``, not normalised), and ``hidden_0``, all hidden states of sentence 0.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

SENTENCES = (
    "The harbour is small enough to walk its length in four minutes.",
    "Wie spät ist es? 東京は雨です。",
    "A sum of cosines, " * 40,
)


def main() -> None:
    folder = sys.argv[1]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    stored = {}
    for i, sentence in enumerate(SENTENCES):
        ids = tokenizer(sentence)["input_ids"]
        with torch.no_grad():
            hidden = model(torch.tensor([ids])).last_hidden_state[0].numpy()
        stored[f"ids_{i}"] = np.array(ids, dtype=np.int32)
        stored[f"mean_{i}"] = hidden.mean(axis=0)
        if i == 0:
            stored["hidden_0"] = hidden
    path = Path("tests/data/minilm.npz")
    np.savez_compressed(path, **stored)
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
