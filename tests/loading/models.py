"""Tiny models of every architecture, as GGUF files and as safetensors folders."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from tests.loading.gguf_writer import write_gguf
from tests.loading.vocabularies import byte_level

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB = 32, 48, 4, 2, 8, 2, 260
Q, KV = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM


def gguf_metadata(architecture: str, **keys: Any) -> dict[str, Any]:
    """Metadata with the dimensions above; ``keys`` are added after the architecture's name."""
    own = {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-6,
        **keys,
    }
    metadata = byte_level() | {"general.architecture": architecture}
    return metadata | {f"{architecture}.{key}": value for key, value in own.items()}


def gguf_tensors(architecture: str = "llama") -> dict[str, np.ndarray]:
    """Weights under GGUF names, each with other values."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for i in range(LAYERS):
        block = f"blk.{i}"
        shapes |= {
            f"{block}.attn_norm.weight": (HIDDEN,),
            f"{block}.attn_output.weight": (HIDDEN, Q),
            f"{block}.ffn_norm.weight": (HIDDEN,),
            f"{block}.ffn_down.weight": (HIDDEN, INNER),
        }
        if architecture == "phi3":
            shapes |= {
                f"{block}.attn_qkv.weight": (Q + 2 * KV, HIDDEN),
                f"{block}.ffn_up.weight": (2 * INNER, HIDDEN),
            }
            continue
        shapes |= {
            f"{block}.attn_q.weight": (Q, HIDDEN),
            f"{block}.attn_k.weight": (KV, HIDDEN),
            f"{block}.attn_v.weight": (KV, HIDDEN),
            f"{block}.ffn_gate.weight": (INNER, HIDDEN),
            f"{block}.ffn_up.weight": (INNER, HIDDEN),
        }
        if architecture in ("gemma2", "gemma3"):
            shapes |= {
                f"{block}.post_attention_norm.weight": (HIDDEN,),
                f"{block}.post_ffw_norm.weight": (HIDDEN,),
            }
        if architecture in ("gemma3", "qwen3"):
            shapes |= {
                f"{block}.attn_q_norm.weight": (HEAD_DIM,),
                f"{block}.attn_k_norm.weight": (HEAD_DIM,),
            }
        if architecture == "qwen2":
            shapes |= {
                f"{block}.attn_q.bias": (Q,),
                f"{block}.attn_k.bias": (KV,),
                f"{block}.attn_v.bias": (KV,),
            }
    return _fill(shapes)


def write_model(path: Path, architecture: str = "llama", **keys: Any) -> Path:
    return write_gguf(path, gguf_metadata(architecture, **keys), gguf_tensors(architecture))


def config(model_type: str = "llama", **keys: Any) -> dict[str, Any]:
    """A ``config.json`` with the dimensions above."""
    return {
        "model_type": model_type,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 128,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000.0,
        **keys,
    }


def hf_tensors(tie: bool = True) -> dict[str, np.ndarray]:
    """Llama weights under Hugging Face names."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (HIDDEN,),
            f"{layer}.self_attn.q_proj.weight": (Q, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": (KV, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": (KV, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": (HIDDEN, Q),
            f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
            f"{layer}.mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{layer}.mlp.up_proj.weight": (INNER, HIDDEN),
            f"{layer}.mlp.down_proj.weight": (HIDDEN, INNER),
        }
    if not tie:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    return _fill(shapes)


def safetensors_bytes(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file with any header: a dictionary, or raw bytes."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def safetensors_entry(dtype: str, shape: tuple[int, ...], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def pack_safetensors(tensors: dict[str, np.ndarray]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in tensors.items():
        dtype = {"float32": "F32", "float16": "F16", "uint16": "BF16"}[array.dtype.name]
        end = len(data) + array.nbytes
        header[name] = safetensors_entry(dtype, array.shape, len(data), end)
        data += array.tobytes()
    return safetensors_bytes(header, data)


def _fill(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(5)
    return {
        name: generator.standard_normal(size).astype(np.float32) for name, size in shapes.items()
    }
