"""Image encoders: a tower over the patches of a tile, and the projector that fits it to the text.

All towers are pre-norm encoders. The patches of a tile see each other: all of them or, in most
layers of Qwen2.5-VL, those of a window. SigLIP and CLIP have learned positions, Qwen's patches turn
by row and column. CLIP starts with a norm, the others end with one. A tile is one request of the
tower's plan, its patches the given rows; a row that stands for no patch (CLIP's) is given as zeros.
The projector's rows are groups of the tower's, or means of groups.

Source: Dosovitskiy et al. 2021 (ViT), section 3.1; Radford et al. 2021 (CLIP); Zhai et al. 2023
(SigLIP); Liu et al. 2023 (LLaVA-1.5), section 3; Marafioti et al. 2025 (SmolVLM), section 2; Wang
et al. 2024 (Qwen2-VL), section 2.1; Bai et al. 2025 (Qwen2.5-VL), section 2.1; Meng et al. 2024
(DeepStack), section 3; Tschannen et al. 2025 (SigLIP 2), section 2; Gemma Team
2025 (Gemma 3), section 2.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from tellin.exceptions import ModelLoadError
from tellin.models.parts import gated_mlp
from tellin.models.plan.builder import PlanBuilder
from tellin.models.plan.ir import Buffer, Plan, RotaryTable
from tellin.models.plan.passes import optimize
from tellin.models.rotary import base_frequencies

if TYPE_CHECKING:
    from tellin.loading.vision import EncoderPart, VisionSource
    from tellin.loading.vision_hparams import VisionHParams


def build_vision_plans(source: VisionSource, *, fuse: bool = True) -> tuple[Plan, ...]:
    """Plans of the tower, of the projector, and of a projector for each tapped layer.

    A row of the tower's is what the projector takes, then what each of the others takes.

    Raises:
        ModelLoadError: a tensor is missing or has the wrong shape.
        UnsupportedModelError: there are tensors that this encoder does not use.
    """
    hp = source.hparams
    plans = [_record_tower(PlanBuilder(source.tower), hp)]
    for part in (source.projector, *source.taps):
        is_tap = part is not source.projector
        projector = _record_projector(PlanBuilder(part), part, hp, is_tap)
        plans.append(structs.replace(projector, architecture="projector"))
    return tuple(map(optimize, plans)) if fuse else tuple(plans)


def _axial(hp: VisionHParams) -> RotaryTable | None:
    """Half of a head's pairs turn by the patch's row, half by its column, alike."""
    if not hp.turns:
        return None
    half = hp.tower.head_dim // 2
    frequencies = tuple(base_frequencies(half, hp.tower.rope_theta).tolist())
    count = len(frequencies)
    return RotaryTable(frequencies * 2, axes=(1,) * count + (2,) * count)


def _record_tower(b: PlanBuilder, hp: VisionHParams) -> Plan:
    is_clip = b.hparams.architecture == "clip"
    rope = _axial(hp)
    if not hp.takes_grids:
        patches = b.linear(b.input(hp.patch_dim), "patch_embed", bias=not is_clip)
        x = b.add_position_embedding(patches, "embed_positions")
    elif hp.table_side:  # a row is a patch and what its position adds
        x = b.linear(b.input(hp.patch_dim + b.hparams.hidden_size), "patch_embed", bias=True)
    else:
        x = b.linear(b.input(hp.patch_dim), "patch_embed", bias=False)
    if is_clip:
        x = b.layer_norm(x, "pre_layernorm")
    tapped: dict[int, Buffer] = {}
    for i in range(b.hparams.num_hidden_layers):
        windowed = bool(hp.window_side) and i not in hp.full_layers
        h = _norm(b, x, f"layers.{i}.input_layernorm")
        x = b.add(x, _attention(b, h, f"layers.{i}.self_attn", rope, windowed))
        h = _norm(b, x, f"layers.{i}.post_attention_layernorm")
        x = b.add(x, _mlp(b, h, f"layers.{i}.mlp"))
        tapped[i] = x
    if is_clip:
        # Layers beyond the one whose output is wanted, and the norm after them.
        return b.finish(x, hidden=x, ignore=("layers.", "norm."))
    x = _norm(b, x, "norm")
    for i in hp.tapped_layers:
        x = b.concat(x, tapped[i])
    # A head that makes one vector of a picture, which the text model does not read.
    return b.finish(x, hidden=x, ignore=("head.",))


def _norm(b: PlanBuilder, x: Buffer, name: str) -> Buffer:
    return b.rms_norm(x, name) if _is_gated(b) else b.layer_norm(x, name)


def _is_gated(b: PlanBuilder) -> bool:
    """Qwen2.5-VL's tower has the norms and the MLP of its text model."""
    return b.hparams.architecture == "qwen2.5"


def _attention(
    b: PlanBuilder, x: Buffer, name: str, rope: RotaryTable | None, windowed: bool
) -> Buffer:
    q = b.linear(x, f"{name}.q_proj", bias=True)
    k = b.linear(x, f"{name}.k_proj", bias=True)
    v = b.linear(x, f"{name}.v_proj", bias=True)
    if rope is not None:
        q, k = b.rope(q, rope), b.rope(k, rope)
    out = b.attention(q, k, v, name=name, causal=False, windowed=windowed)
    return b.linear(out, f"{name}.o_proj", bias=True)


def _mlp(b: PlanBuilder, x: Buffer, name: str) -> Buffer:
    if _is_gated(b):
        return gated_mlp(b, x, name)
    up = b.linear(x, f"{name}.up_proj", bias=True)
    return b.linear(b.activation(up), f"{name}.down_proj", bias=True)


def _record_projector(b: PlanBuilder, part: EncoderPart, hp: VisionHParams, is_tap: bool) -> Plan:
    if hp.pools:
        x = b.rms_norm(b.input(hp.tower.hidden_size), "projector_norm", weight_offset=0.0)
    else:
        x = b.input(hp.tower.hidden_size * hp.group_side**2)
    if is_tap or hp.projector_norm_eps is not None:
        x = b.layer_norm(x, "projector_norm")
    x = b.linear(x, "projector_1")
    if hp.projector_act is not None:
        x = b.linear(b.activation(x), "projector_2")
    if x.width != hp.text_hidden_size:
        raise ModelLoadError(
            f"{part.path}: the image encoder makes rows of {x.width} values, but the text model "
            f"has a hidden_size of {hp.text_hidden_size}"
        )
    return b.finish(x, hidden=x)
