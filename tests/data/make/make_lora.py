"""Makes tests/data/lora.npz: what `transformers` computes with adapters merged into SmolLM2.

Run it with PyTorch, transformers, accelerate and gguf installed, from the repository root:

    PYTHONPATH=src:. python tests/data/make/make_lora.py PATH/OF/SmolLM2-135M-Instruct.Q4_1.gguf

The adapters are `smollm2_adapters` of tests/models/adapters.py; their products are added to the
weights in float32. Stored: ``ids`` (a text), and per adapter the 10 largest logits after it,
``top_ids_NAME`` and ``top_logits_NAME``; ``base`` has none.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.models.adapters import smollm2_adapters

TEXT = "The harbour is small enough to walk its length in four minutes."
SCALE = 2.0
"""Of every product: alpha is twice the rank."""


def main() -> None:
    path = Path(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = tokenizer(TEXT)["input_ids"]
    stored = {"ids": np.array(ids, dtype=np.int32)}
    layers = dict(model.model.named_modules())
    for name, pairs in {"base": {}, **smollm2_adapters()}.items():
        products = {
            layer: SCALE * torch.from_numpy(b) @ torch.from_numpy(a)
            for layer, (a, b) in pairs.items()
        }
        with torch.no_grad():
            originals = {layer: layers[layer].weight.clone() for layer in products}
            for layer, product in products.items():
                layers[layer].weight += product
            logits = model(torch.tensor([ids])).logits[0, -1]
            for layer, weight in originals.items():
                layers[layer].weight.copy_(weight)
        top = logits.topk(10)
        stored[f"top_ids_{name}"] = top.indices.numpy().astype(np.int32)
        stored[f"top_logits_{name}"] = top.values.numpy()
    target = Path("tests/data/lora.npz")
    np.savez_compressed(target, **stored)
    print(f"{target}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
