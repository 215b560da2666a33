"""Writes a model whose own layer predicts its next id as often as is wanted (method mtp).

    python -m benchmarks.synthetic_predictor /tmp/predictor

A MiMo in float16, whose layers compute with random weights and whose last matrices are zero: all of
the work is done, and what comes out is the embedding. The embeddings of the first `NUM_IDS` ids are
orthogonal and the output matrix has them in another order, so every id has one successor. The
predicting layer is given the same of most ids, and of the others another one's: it is right about
the former. Ids form circles, each with its share of the former, so a prompt's last id chooses how
often drafts are right.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = dict[str, npt.NDArray[np.float16]]
CHANCES = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Shares of right drafts, one for each circle of ids."""
CIRCLE = 100
NUM_IDS = CIRCLE * len(CHANCES)


@dataclass(frozen=True)
class PredictorShape:
    """Dimensions; the output matrix is to a layer what it is in models of a billion weights."""

    hidden_size: int = 1024
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    vocab_size: int = 32_768


SHAPE = PredictorShape()
TINY = PredictorShape(512, 512, 2, 4, 2, 512)


def successor(token: int) -> int:
    """The id that the model puts after an id below `NUM_IDS`."""
    circle, place = divmod(token, CIRCLE)
    return circle * CIRCLE + (place + 1) % CIRCLE


def circle_prompt(chance: float, number: int, length: int = 16) -> list[int]:
    """The ``number``-th prompt after which drafts are right so often."""
    token = CHANCES.index(chance) * CIRCLE + 37 * number % CIRCLE
    ids = [token]
    while len(ids) < length:
        ids.append(successor(ids[-1]))
    return ids


def write_predictor(folder: Path, shape: PredictorShape = SHAPE) -> Path:
    """A checkpoint's folder, without a tokenizer."""
    from safetensors.numpy import save_file

    random = np.random.default_rng(1)
    hidden, head_dim = shape.hidden_size, shape.hidden_size // shape.num_attention_heads
    rows = np.linalg.qr(random.standard_normal((hidden, NUM_IDS)))[0].T * np.sqrt(hidden)
    embeddings = np.zeros((shape.vocab_size, hidden), np.float16)
    embeddings[:NUM_IDS] = rows
    output = np.zeros_like(embeddings)
    output[[successor(token) for token in range(NUM_IDS)]] = rows / np.sqrt(hidden)
    seen = np.arange(NUM_IDS)  # whose embedding the layer is given
    for circle, chance in enumerate(CHANCES):
        wrong = random.permutation(CIRCLE)[round(chance * CIRCLE) :] + circle * CIRCLE
        seen[wrong] = (wrong + CIRCLE) % NUM_IDS
    of_id = rows[seen].T @ rows / hidden
    arrays: Arrays = {
        "model.embed_tokens.weight": embeddings,
        "lm_head.weight": output,
        "model.norm.weight": np.ones(hidden, np.float16),
    }
    for i in range(shape.num_hidden_layers):
        arrays |= _layer(f"model.layers.{i}", shape, random)
    prefix = "model.mtp_layers.0"
    arrays |= _layer(prefix, shape, random)
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        arrays[f"{prefix}.{name}.weight"] = np.ones(hidden, np.float16)
    # The hidden state first, which is not needed, then the embedding.
    halves = [np.zeros_like(of_id), of_id]
    arrays[f"{prefix}.input_proj.weight"] = np.concatenate(halves, axis=1).astype(np.float16)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(arrays, folder / "model.safetensors")
    config: dict[str, Any] = {
        "model_type": "mimo",
        "vocab_size": shape.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 640_000.0,
        "attention_bias": True,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _layer(prefix: str, shape: PredictorShape, random: np.random.Generator) -> Arrays:
    """A layer that adds nothing to what it is given."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    kv = hidden // shape.num_attention_heads * shape.num_key_value_heads
    arrays: Arrays = {
        f"{prefix}.self_attn.o_proj.weight": np.zeros((hidden, hidden), np.float16),
        f"{prefix}.mlp.down_proj.weight": np.zeros((hidden, inner), np.float16),
    }
    for norm in ("input", "post_attention"):
        arrays[f"{prefix}.{norm}_layernorm.weight"] = np.ones(hidden, np.float16)
    sizes = {"self_attn.q_proj": hidden, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
    sizes |= {"mlp.gate_proj": inner, "mlp.up_proj": inner}
    for name, size in sizes.items():
        values = random.standard_normal((size, hidden), np.float32) / np.sqrt(hidden)
        arrays[f"{prefix}.{name}.weight"] = values.astype(np.float16)
        if "attn" in name:
            arrays[f"{prefix}.{name}.bias"] = np.zeros(size, np.float16)
    return arrays


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    write_predictor(parser.parse_args().folder)


if __name__ == "__main__":
    main()
