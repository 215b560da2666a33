"""Makes tests/data/gemma3n_logits.npz: logits of the tiny Gemma 3n, by `transformers`.

Run it with PyTorch, transformers and timm installed, from the repository root:

    PYTHONPATH=src:. python tests/data/make/make_gemma3n_logits.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers

from tests.models.gemma3n import CONFIG, arrays
from tests.models.gemma4 import token_ids


def make_model() -> transformers.PreTrainedModel:
    config = {key: value for key, value in CONFIG.items() if key != "model_type"}
    text = transformers.Gemma3nTextConfig(**config, attn_implementation="eager", pad_token_id=0)
    model = transformers.Gemma3nForCausalLM(text).float().eval()
    state = {key: torch.from_numpy(value) for key, value in arrays().items()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model


def main() -> None:
    ids = torch.from_numpy(token_ids().astype(np.int64))[None]
    with torch.no_grad():
        logits = make_model()(input_ids=ids, use_cache=False).logits[0].numpy()
    np.savez_compressed(Path(__file__).parents[1] / "gemma3n_logits.npz", logits=logits)


if __name__ == "__main__":
    main()
