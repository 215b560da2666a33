"""Text models inside of models that see: logits of `transformers` for prompts without pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tellin.kernels.reference import ReferenceBackend
from tellin.loading import open_model
from tellin.models import build_plan
from tests.models.stepping import logits_of
from tests.models.tiny import tiny_token_ids

TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {"depth": 1, "num_heads": 2, "patch_size": 4, "hidden_size": 32, "intermediate_size": 32}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ("Qwen2VL", {}, {"embed_dim": 32, "hidden_size": 64}),
    "qwen2_5_vl": ("Qwen2_5_VL", {}, {"out_hidden_size": 64}),
    "qwen3_vl": (
        "Qwen3VL",
        {"head_dim": 32},
        {"out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_text_models_of_qwen_vl(name: str, tmp_path: Path) -> None:
    import torch
    import transformers

    prefix, text, vision = CASES[name]
    quarter = text.get("head_dim", 16) // 8
    rope = {
        "rope_type": "default",
        "rope_theta": 5000.0,
        "mrope_section": [quarter, quarter, 2 * quarter],
    }
    config = getattr(transformers, f"{prefix}Config")(
        text_config=TEXT | text | {"rope_parameters": rope}, vision_config=VISION | vision
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model_type = f"{prefix}ForConditionalGeneration"
    model = getattr(transformers, model_type)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
        ids = torch.from_numpy(tiny_token_ids().astype(np.int64))[None]
        expected = model(ids).logits[0].numpy()
    model.save_pretrained(tmp_path)
    with open_model(tmp_path) as source:
        logits = logits_of(ReferenceBackend(build_plan(source)), tiny_token_ids())
    assert expected.std() > 0.3
    np.testing.assert_allclose(logits, expected, rtol=0, atol=5e-5)
