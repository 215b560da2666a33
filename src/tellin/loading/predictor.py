"""The layer that predicts one token more (multi-token prediction), as models' files hold it.

It follows the model's own layers: its canonical name is ``layers.{num_hidden_layers}``, and beside
what a layer of its family has it holds ``enorm`` (norm of a token's embedding), ``hnorm`` (norm of
the hidden state before it), ``eh_proj`` (which makes one row of both), ``shared_head.norm`` and
perhaps copies of the model's ``embed_tokens`` and ``shared_head.head``. Of several such layers the
first is read. A model is opened without them; whoever wants them opens it once more.

Source: DeepSeek-AI 2024 (DeepSeek-V3), section 2.2; names are those of published checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from tellin.loading.gated_delta import GATED_DELTA
from tellin.loading.tensors import ModelHParams, TensorRef

GGUF_PREDICTOR = {
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
_FOLLOWS_LAYERS = ("deepseek2", "glm4moe", "nemotron_h_moe", *GATED_DELTA)
"""Architectures whose files number these layers like the others, and go on counting."""
_NUMBERED = re.compile(r"(?:model\.layers|blk)\.(\d+)\.")
_PARTS = re.compile(r"\.(nextn|eh_proj|enorm|hnorm|shared_head)\.")
"""Parts of the first of these layers that no other layer has."""
_HF_NAMES = re.compile(r"(?:model\.)?(?:mtp\.layers|mtp_layers)\.(\d+)\.(.+)")
_HF_QWEN = re.compile(r"(?:model\.)?mtp\.([^.]+)\.(.+)")
_HF_ERNIE = re.compile(r"(?:model\.)?mtp_(block|emb_norm|hidden_norm|linear_proj)\.(\d+)\.(.+)")
_HF_PARTS = {
    "fc": "eh_proj",
    "norm": "shared_head.norm",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "final_layernorm": "shared_head.norm",
    "hidden_layernorm": "hnorm",
    "input_proj": "eh_proj",
    "token_layernorm": "enorm",
    "emb_norm": "enorm",
    "hidden_norm": "hnorm",
    "linear_proj": "eh_proj",
}
"""Qwen's names, MiMo's and ERNIE's."""
_SHARED = re.compile(r"(embed_tokens|lm_head|norm)\.")


def is_predictor_hf_name(name: str) -> bool:
    """Whether a checkpoint's tensor is of such a layer, where those have names of their own."""
    return _hf_place(name) is not None


def _hf_place(name: str) -> tuple[int, str] | None:
    """Which of these layers a checkpoint's tensor is of, and its name in it; None: of no such."""
    if (match := _HF_NAMES.match(name)) is not None:
        number, rest = match[1], match[2]
    elif (match := _HF_ERNIE.match(name)) is not None:
        number, rest = match[2], match[3] if match[1] == "block" else f"{match[1]}.{match[3]}"
    elif (match := _HF_QWEN.match(name)) is not None:
        number, rest = "0", f"{match[1]}.{match[2]}"
    else:
        return None
    stem, _, kind = rest.rpartition(".")
    return int(number), f"{_HF_PARTS.get(stem, stem)}.{kind}"


def own_layers(hparams: ModelHParams, tensors: Mapping[str, TensorRef]) -> Iterator[TensorRef]:
    """The tensors without those of layers that follow the last one: they predict further tokens.

    Other layers stay, and are refused as unused: a configuration that names too few is wrong.
    """
    count = hparams.num_hidden_layers
    has_more = hparams.architecture in _FOLLOWS_LAYERS
    if has_more:
        matches = (_NUMBERED.match(name) for name in tensors if _PARTS.search(name))
        has_more = any(match is not None and int(match[1]) == count for match in matches)
    for name, tensor in tensors.items():
        match = _NUMBERED.match(name) if has_more else None
        if match is None or int(match[1]) < count:
            yield tensor


def predictor_layer(hparams: ModelHParams, tensors: Mapping[str, TensorRef]) -> Iterator[TensorRef]:
    """The first such layer's tensors, under names as other layers have them, and those of none."""
    count = hparams.num_hidden_layers
    for name, tensor in tensors.items():
        numbered, place = _NUMBERED.match(name), _hf_place(name)
        if numbered is not None:
            if int(numbered[1]) == count:
                yield tensor
        elif place is None:
            yield tensor
        elif place[0] == 0:
            yield replace(tensor, name=f"model.layers.{count}.{place[1]}")


def only_predictor(
    hparams: ModelHParams, canonical: Mapping[str, TensorRef]
) -> dict[str, TensorRef]:
    """Of tensors by canonical name those of the layer, and the model's embedding, norm and head."""
    layer = f"layers.{hparams.num_hidden_layers}."
    return {
        name: tensor
        for name, tensor in canonical.items()
        if name.startswith(layer) or _SHARED.match(name)
    }
