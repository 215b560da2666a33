"""Makes tests/data/decoders.npz: logits of tests.models.tiny_decoders, computed by `transformers`.

Run it with PyTorch and transformers installed, from the repository root:

    PYTHONPATH=src:. python tests/data/make/make_decoders.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

from tests.models.tiny_decoders import DECODERS, decoder_token_ids, write_tiny_decoder


def main() -> None:
    stored = {}
    token_ids = torch.from_numpy(decoder_token_ids()).long()[None]
    for name in DECODERS:
        with tempfile.TemporaryDirectory() as folder:
            write_tiny_decoder(Path(folder), name)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager"
            )
            with torch.no_grad():
                stored[name] = model(token_ids, use_cache=False).logits[0].numpy()
    np.savez_compressed(Path(__file__).parents[1] / "decoders.npz", **stored)


if __name__ == "__main__":
    main()
