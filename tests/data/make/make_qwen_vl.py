"""Golden rows and logits of the tiny models of `tests.models.qwen_vl`, by `transformers`.

    python -m tests.data.make.make_qwen_vl

Needs PyTorch and transformers 5.24; run it in the repository's root.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.models.qwen_vl import CASES, IMAGE_TOKEN_ID, PICTURES, Prompt, write_qwen_vl


def reference(folder: Path, ids: list[int], pictures: Any) -> dict[str, np.ndarray]:
    """Pixels, grids, positions, rows of the encoder and logits of all tokens, in float32."""
    given = Qwen2VLImageProcessorPil.from_pretrained(folder)(list(pictures), return_tensors="pt")
    pixels, grids = given["pixel_values"], given["image_grid_thw"]
    model = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = torch.tensor([ids])
    types = (tokens == IMAGE_TOKEN_ID).int()
    with torch.no_grad():
        features = model.model.get_image_features(pixels, grids)
        positions, _ = model.model.get_rope_index(tokens, types, grids)
        logits = model(
            input_ids=tokens, pixel_values=pixels, image_grid_thw=grids, mm_token_type_ids=types
        ).logits[0]
    deepstack = getattr(features, "deepstack_features", None) or []
    rows = [torch.cat(list(parts)) for parts in (features.pooler_output, *deepstack)]
    return {
        "pixels": pixels.numpy(),
        "grids": grids.numpy(),
        "positions": positions[:, 0].numpy(),
        "rows": torch.cat(rows, dim=1).numpy(),
        "logits": logits.numpy(),
    }


def main() -> None:
    stored = {}
    with tempfile.TemporaryDirectory() as temporary:
        for case in CASES:
            folder = write_qwen_vl(Path(temporary) / case, case)
            values = reference(folder, Prompt(folder).ids, PICTURES)
            stored[f"{case}_rows"] = values["rows"]
            stored[f"{case}_logits"] = values["logits"][-4:]
            print(case, values["rows"].std(), values["logits"].std())
    path = Path("tests/data/qwen_vl.npz")
    np.savez_compressed(path, **stored)
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
