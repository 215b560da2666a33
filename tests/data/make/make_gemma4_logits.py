"""Makes tests/data/gemma4_logits.npz: logits of the tiny Gemma 4 models, by `transformers`.

Run it with PyTorch and transformers installed, from the repository root:

    PYTHONPATH=src:. python tests/data/make/make_gemma4_logits.py

Each case of `tests.models.gemma4` is loaded into `transformers` in float32 with eager attention
and run over one prompt.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers

from tests.models.gemma4 import CASES, arrays, token_ids


def make_model(name: str) -> transformers.PreTrainedModel:
    config = {key: value for key, value in CASES[name].items() if key != "model_type"}
    text = transformers.Gemma4TextConfig(**config, attn_implementation="eager", pad_token_id=0)
    model = transformers.Gemma4ForCausalLM(text).float().eval()
    state = {key: torch.from_numpy(value) for key, value in arrays(name).items()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model


def main() -> None:
    stored = {}
    for name in CASES:
        ids = torch.from_numpy(token_ids().astype(np.int64))[None]
        with torch.no_grad():
            stored[name] = make_model(name)(input_ids=ids, use_cache=False).logits[0].numpy()
    np.savez_compressed(Path(__file__).parents[1] / "gemma4_logits.npz", **stored)


if __name__ == "__main__":
    main()
