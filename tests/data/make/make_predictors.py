"""Golden logits of layers that predict further tokens, put together from parts of `transformers`.

    python -m tests.data.make.make_predictors

`transformers` leaves such layers out. Here each is a model of one layer of the same class, which is
given the rows that the layer's inputs make; the model itself gives the hidden states. Stored per
case of `tests.models.predictors`, for the tiny prompt: ``name``, logits of every row but the last,
and ``name.chained``, logits of one row more, made of the layer's own state and its best id.

Needs PyTorch and transformers 5.24; run it in the repository's root.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.loading.models import pack_safetensors
from tests.models import predictors
from tests.models.tiny import tiny_token_ids

CLASSES = {
    "qwen35": "Qwen3_5ForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM",
    "qwen3next": "Qwen3NextForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "mimo": "Qwen2ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
}
EPS = {name: 1e-6 if name in predictors.QWEN else 1e-5 for name in predictors.CASES}


def load(folder: Path, name: str, changes: dict[str, Any], arrays: predictors.Arrays) -> Any:
    """A model of the case's class with these weights."""
    values = predictors.config(name) | changes
    values.pop("num_nextn_predict_layers", None)
    if name == "mimo":
        values["model_type"] = "qwen2"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "model.safetensors").write_bytes(pack_safetensors(arrays))
    model, report = getattr(transformers, CLASSES[name]).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    return model.eval()


def states(model: Any, **inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states before and after the last norm."""
    before: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: before.append(args[0]))
    after = model.model(**inputs, use_cache=False).last_hidden_state
    hook.remove()
    return before[0][0], after[0]


def norm(name: str, x: torch.Tensor, weight: np.ndarray) -> torch.Tensor:
    scale = torch.from_numpy(weight) + (1.0 if name in predictors.QWEN else 0.0)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS[name]) * scale


@torch.no_grad()
def logits_of(folder: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    own, inputs = predictors.own_arrays(name), predictors.input_arrays(name)
    target = load(folder / "target", name, {}, own)
    layer = {f"model.layers.0.{part}": a for part, a in predictors.layer_arrays(name).items()}
    shared = {key: own[key] for key in ("model.embed_tokens.weight", "lm_head.weight")}
    one = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "layer_types": ["full_attention"]}
    if name not in predictors.QWEN:
        del one["layer_types"]
    if name == "glm4_moe_lite":
        one["mlp_layer_types"] = ["sparse"]
    arrays = layer | shared | {"model.norm.weight": inputs["norm"]}
    predictor = load(folder / "predictor", name, one, arrays)
    ids = torch.from_numpy(tiny_token_ids().astype(np.int64))
    before, after = states(target, input_ids=ids[None])
    hidden = (before if name == "mimo" else after)[:-1]
    eh_proj = torch.from_numpy(inputs["eh_proj"])

    def rows(following: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        embedded = target.model.embed_tokens(following)
        halves = [norm(name, embedded, inputs["enorm"]), norm(name, hidden, inputs["hnorm"])]
        return torch.cat(halves[::-1] if name == "mimo" else halves, -1) @ eh_proj.T

    x = rows(ids[1:], hidden)
    _, normed = states(predictor, inputs_embeds=x[None])
    logits = predictor.lm_head(normed)
    more = torch.cat([x, rows(logits[-1:].argmax(-1), normed[-1:])])
    chained = predictor.lm_head(states(predictor, inputs_embeds=more[None])[1])
    return logits.numpy(), chained[-1].numpy()


def main() -> None:
    stored = {}
    for name in predictors.CASES:
        with tempfile.TemporaryDirectory() as temporary:
            stored[name], stored[f"{name}.chained"] = logits_of(Path(temporary), name)
        print(name, stored[name].shape, "std", stored[name].std())
    path = Path("tests/data/predictors.npz")
    np.savez_compressed(path, **stored)
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
