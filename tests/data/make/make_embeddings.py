"""Makes tests/data/embeddings.npz: embeddings that `transformers` computes with a decoder.

Run it with PyTorch, transformers and accelerate installed, from the repository root:

    python tests/data/make/make_embeddings.py PATH/OF/SmolLM2-135M-Instruct.Q4_1.gguf

Stored per sentence i: ``ids_i`` (token ids) and ``last_i``: the last token's hidden state after the
final norm, scaled to length 1, float32 ``[576]``.
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
    path = Path(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModel.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    stored = {}
    for i, sentence in enumerate(SENTENCES):
        ids = tokenizer(sentence)["input_ids"]
        with torch.no_grad():
            last = model(torch.tensor([ids])).last_hidden_state[0, -1].double().numpy()
        stored[f"ids_{i}"] = np.array(ids, dtype=np.int32)
        stored[f"last_{i}"] = (last / np.linalg.norm(last)).astype(np.float32)
    target = Path("tests/data/embeddings.npz")
    np.savez_compressed(target, **stored)
    print(f"{target}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
