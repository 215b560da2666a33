"""Image encoders: a tower over the patches of a tile, and the projector that fits it to the text.

Both towers are pre-norm encoders with learned positions whose patches all see each other. SigLIP
ends with a norm; CLIP starts with one, and what it ends with is not used. A tile is one request of
the tower's plan, its patches the given rows; a row that stands for no patch (CLIP's) is given as
zeros. The projector's rows are groups of the tower's, or means of groups.

Source: Dosovitskiy et al. 2021 (ViT), section 3.1; Radford et al. 2021 (CLIP); Zhai et al. 2023
(SigLIP); Liu et al. 2023 (LLaVA-1.5), section 3; Marafioti et al. 2025 (SmolVLM), section 2;
Gemma Team 2025 (Gemma 3), section 2.1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tellin.exceptions import ModelLoadError
from tellin.models.plan.builder import PlanBuilder
from tellin.models.plan.ir import Buffer, Plan, RotaryTable
from tellin.models.plan.passes import optimize
from tellin.models.rotary import base_frequencies

if TYPE_CHECKING:
    from tellin.loading.vision import VisionSource
    from tellin.loading.vision_hparams import VisionHParams


def build_vision_plans(source: VisionSource, *, fuse: bool = True) -> tuple[Plan, Plan]:
    """Plans of the tower and of the projector.

    Raises:
        ModelLoadError: a tensor is missing or has the wrong shape.
        UnsupportedModelError: there are tensors that this encoder does not use.
    """
    hp = source.hparams
    tower = _record_tower(PlanBuilder(source.tower), hp.patch_dim, _axial(hp))
    projector = _record_projector(PlanBuilder(source.projector), source)
    projector = replace(projector, architecture="projector")
    return (optimize(tower), optimize(projector)) if fuse else (tower, projector)


def _axial(hp: VisionHParams) -> RotaryTable | None:
    """Half of a head's pairs turn by the patch's row, half by its column, alike."""
    if not hp.takes_grids:
        return None
    half = hp.tower.head_dim // 2
    frequencies = tuple(base_frequencies(half, hp.tower.rope_theta).tolist())
    count = len(frequencies)
    return RotaryTable(frequencies * 2, axes=(1,) * count + (2,) * count)


def _record_tower(b: PlanBuilder, patch_dim: int, rope: RotaryTable | None) -> Plan:
    is_clip = b.hparams.architecture == "clip"
    if rope is None:
        patches = b.linear(b.input(patch_dim), "patch_embed", bias=not is_clip)
        x = b.add_position_embedding(patches, "embed_positions")
    else:  # a row is a patch and what its position adds
        x = b.linear(b.input(patch_dim + b.hparams.hidden_size), "patch_embed", bias=True)
    if is_clip:
        x = b.layer_norm(x, "pre_layernorm")
    for i in range(b.hparams.num_hidden_layers):
        h = b.layer_norm(x, f"layers.{i}.input_layernorm")
        x = b.add(x, _attention(b, h, f"layers.{i}.self_attn", rope))
        h = b.layer_norm(x, f"layers.{i}.post_attention_layernorm")
        x = b.add(x, _mlp(b, h, f"layers.{i}.mlp"))
    if is_clip:
        # Layers beyond the one whose output is wanted, and the norm after them.
        return b.finish(x, hidden=x, ignore=("layers.", "norm."))
    x = b.layer_norm(x, "norm")
    # A head that makes one vector of a picture, which the text model does not read.
    return b.finish(x, hidden=x, ignore=("head.",))


def _attention(b: PlanBuilder, x: Buffer, name: str, rope: RotaryTable | None) -> Buffer:
    q = b.linear(x, f"{name}.q_proj", bias=True)
    k = b.linear(x, f"{name}.k_proj", bias=True)
    v = b.linear(x, f"{name}.v_proj", bias=True)
    if rope is not None:
        q, k = b.rope(q, rope), b.rope(k, rope)
    out = b.attention(q, k, v, name=name, causal=False)
    return b.linear(out, f"{name}.o_proj", bias=True)


def _mlp(b: PlanBuilder, x: Buffer, name: str) -> Buffer:
    up = b.linear(x, f"{name}.up_proj", bias=True)
    return b.linear(b.activation(up), f"{name}.down_proj", bias=True)


def _record_projector(b: PlanBuilder, source: VisionSource) -> Plan:
    hp = source.hparams
    if hp.pools:
        x = b.rms_norm(b.input(hp.tower.hidden_size), "projector_norm", weight_offset=0.0)
    else:
        x = b.input(hp.tower.hidden_size * hp.group_side**2)
    x = b.linear(x, "projector_1")
    if hp.projector_act is not None:
        x = b.linear(b.activation(x), "projector_2")
    if x.width != hp.text_hidden_size:
        raise ModelLoadError(
            f"{source.path}: the image encoder makes rows of {x.width} values, but the text model "
            f"has a hidden_size of {hp.text_hidden_size}"
        )
    return b.finish(x, hidden=x)
