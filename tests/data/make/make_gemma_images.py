"""Encoder rows and log-probabilities of the tiny Gemma 3 of `tests.models.gemma_images`.

    python -m tests.data.make.make_gemma_images

Needs PyTorch and transformers 5.24; run it in the repository's root.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForImageTextToText
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from tellin.loading import load_tokenizer
from tests.models.gemma_images import EXPANDED, SOFT_ID, TALL, WIDE, write_gemma


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_gemma(Path(temporary))
        given = Gemma3ImageProcessorPil.from_pretrained(folder)([WIDE, TALL], return_tensors="pt")
        ids = torch.tensor([load_tokenizer(folder).encode(EXPANDED)])
        model = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        with torch.no_grad():
            rows = model.model.get_image_features(given["pixel_values"]).pooler_output
            logits = model(
                input_ids=ids,
                pixel_values=given["pixel_values"],
                token_type_ids=(ids == SOFT_ID).int(),
            ).logits[0]
    logprobs = torch.log_softmax(logits[:-1], dim=-1).gather(1, ids[0, 1:, None])[:, 0]
    path = Path("tests/data/gemma_images.npz")
    np.savez_compressed(
        path,
        rows=rows.reshape(-1, rows.shape[-1]).numpy(),
        prompt_logprobs=logprobs.numpy(),
        last_logits=logits[-1].numpy(),
    )
    print(f"{path}: {path.stat().st_size} bytes; logits std {logits.std():.3f}")


if __name__ == "__main__":
    main()
