"""Golden rows and logits of the tiny model of `tests.models.lfm2_vl`, by `transformers`.

    python -m tests.data.make.make_lfm2_vl

Needs PyTorch and transformers 5.24; run it in the repository's root. The pixels are ours: the
model's own image processor needs torchvision.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForImageTextToText

from tellin.loading import load_image_processor, load_tokenizer
from tellin.loading.images import ProcessedImage
from tests.models.lfm2_vl import PICTURES, PROMPT, write_lfm2_vl


def tiles_of(images: list[ProcessedImage]) -> dict[str, torch.Tensor]:
    """Tiles in the order of pixels that the model takes, filled up to equal lengths."""
    most = max(image.values.shape[1] for image in images)
    pixels, masks, shapes = [], [], []
    for image in images:
        for tile, (rows, columns) in zip(image.pixels, image.shapes or (), strict=True):
            count = 4 * rows * columns
            split = tile[:count].reshape(rows, columns, 2, 2, 3, 4, 4)
            patches = split.transpose(0, 2, 1, 3, 5, 6, 4).reshape(count, -1)
            pixels.append(np.pad(patches, ((0, most - count), (0, 0))))
            masks.append(np.arange(most) < count)
            shapes.append([2 * rows, 2 * columns])
    return {
        "pixel_values": torch.tensor(np.stack(pixels)),
        "pixel_attention_mask": torch.tensor(np.stack(masks)).int(),
        "spatial_shapes": torch.tensor(shapes),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_lfm2_vl(Path(temporary) / "model")
        processor = load_image_processor(folder)
        assert processor is not None
        images = [processor.process(image) for image in PICTURES]
        text = PROMPT.format(*(image.prompt for image in images))
        ids = torch.tensor([load_tokenizer(folder).encode(text)])
        model = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        tiles = tiles_of(images)
        with torch.no_grad():
            rows = torch.cat(list(model.model.get_image_features(**tiles).pooler_output)).numpy()
            logits = model(input_ids=ids, **tiles).logits[0].numpy()
    print(rows.shape, rows.std(), logits.shape, logits.std())
    path = Path("tests/data/lfm2_vl.npz")
    np.savez_compressed(path, rows=rows, logits=logits[-4:])
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
