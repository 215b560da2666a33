"""`VisionSource`: the image encoder of a model folder, its tensors under canonical names.

The text half of the same folder is opened by `open_model`; either may be opened without the other.
Weights are views of the files, except a position table that the class row was added to.

Canonical names are the text models' where there is one; ``patch_embed.{weight,bias}`` and
``pre_layernorm`` stand before the layers, ``projector_norm``, ``projector_1`` and ``projector_2``
after them; ``tap_{n}`` has such a projector of its own, for rows of a layer in between.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.loading import gguf
from tellin.loading.dequantize import dequantize
from tellin.loading.hf_hparams import hparams_from_config
from tellin.loading.json_file import read_json_object
from tellin.loading.model_source import WeightFile, locate_model
from tellin.loading.names import is_vision_hf_name
from tellin.loading.safetensors import SafetensorsFile, open_safetensors
from tellin.loading.tensors import ModelHParams, QuantType, TensorRef
from tellin.loading.typed_mapping import TypedMapping
from tellin.loading.vision_gguf import (
    canonical_gguf_vision,
    gguf_image_settings,
    gguf_vision_hparams,
    mmproj_files,
)
from tellin.loading.vision_hparams import VisionHParams, vision_hparams
from tellin.loading.vision_naflex import prepare_naflex_tower
from tellin.loading.vision_qwen import Float32Array, canonical_qwen_name, prepare_grid_tower

logger = logging.getLogger("tellin.loading")

_PREFIX = re.compile(
    r"(model\.)?(vision_model|vision_tower(\.vision_model)?|connector|multi_modal_projector)\."
)
_NAMES = (
    (re.compile(r"embeddings\.patch_embedding\."), "patch_embed."),
    (re.compile(r"embeddings\.position_embedding\."), "embed_positions."),
    (re.compile(r"embeddings\.class_embedding\Z"), "class_embedding"),
    (re.compile(r"pre_layrnorm\."), "pre_layernorm."),
    (re.compile(r"post_layernorm\."), "norm."),
    (re.compile(r"encoder\.layers\.(\d+)\.layer_norm1\."), r"layers.\1.input_layernorm."),
    (re.compile(r"encoder\.layers\.(\d+)\.layer_norm2\."), r"layers.\1.post_attention_layernorm."),
    (re.compile(r"encoder\.layers\.(\d+)\.self_attn\.out_proj\."), r"layers.\1.self_attn.o_proj."),
    (re.compile(r"encoder\.layers\.(\d+)\.mlp\.fc1\."), r"layers.\1.mlp.up_proj."),
    (re.compile(r"encoder\.layers\.(\d+)\.mlp\.fc2\."), r"layers.\1.mlp.down_proj."),
    (re.compile(r"encoder\.layers\."), "layers."),
    (re.compile(r"modality_projection\.proj\."), "projector_1."),
    (re.compile(r"\Alayer_norm\."), "projector_norm."),
    (re.compile(r"linear_([12])\."), r"projector_\1."),
    (re.compile(r"mm_input_projection_weight\Z"), "projector_1.weight"),
    (re.compile(r"mm_soft_emb_norm\."), "projector_norm."),
)


@dataclass(frozen=True)
class EncoderPart:
    """The tower, or the projector: what recording a plan needs of a model."""

    path: Path
    hparams: ModelHParams
    tensors: Mapping[str, TensorRef]


class VisionSource:
    """An opened image encoder: ``hparams``, and ``tower`` and ``projector`` to record plans from.

    ``position_table`` is what is stretched over a picture, if the encoder has that. ``taps`` are
    the projectors of `VisionHParams.tapped_layers`.

    `close` lets go of the files; tensors that are still held stay valid.
    """

    def __init__(
        self,
        path: Path,
        hparams: VisionHParams,
        tensors: Mapping[str, TensorRef],
        files: Sequence[WeightFile],
    ) -> None:
        self.path = path
        self.hparams = hparams
        tensors = {name: replace(tensor, name=name) for name, tensor in tensors.items()}
        tower = {k: v for k, v in tensors.items() if not k.startswith(("projector_", "tap_"))}
        projector = {k: v for k, v in tensors.items() if k.startswith("projector_")}
        self.position_table: Float32Array | None = None
        if hparams.takes_grids:
            prepare = prepare_grid_tower if hparams.turns else prepare_naflex_tower
            grid = prepare(path, tower, hparams)
            tower, self.position_table = grid.tensors, grid.position_table
        else:
            tower = self._prepared(tower)
        if hparams.pools:
            projector = self._turned(projector)
        self.tower = EncoderPart(path, hparams.tower, tower)
        act = hparams.projector_act or hparams.tower.hidden_act
        own = replace(
            hparams.tower,
            hidden_size=hparams.text_hidden_size,
            hidden_act=act,
            norm_eps=hparams.projector_norm_eps or hparams.tower.norm_eps,
        )
        self.projector = EncoderPart(path, own, projector)
        taps: list[dict[str, TensorRef]] = [{} for _ in hparams.tapped_layers]
        for name, tensor in tensors.items():
            tap, _, rest = name.partition(".")
            if not tap.startswith("tap_"):
                continue
            index = int(tap.removeprefix("tap_"))
            if index >= len(taps):
                raise ModelLoadError(
                    f"{path}: tensor {tensor.name!r} is of a projector that the image encoder "
                    f"does not have; it has {len(taps)} for layers in between"
                )
            taps[index][rest] = tensor
        self.taps = tuple(EncoderPart(path, own, part) for part in taps)
        self._files = tuple(files)

    def release_pages(self) -> None:
        """Let the system drop the files' pages from this process."""
        for file in self._files:
            file.release_pages()

    def close(self) -> None:
        """Let go of the files. Idempotent."""
        for file in self._files:
            file.close()
        self._files = ()

    def _prepared(self, tensors: dict[str, TensorRef]) -> dict[str, TensorRef]:
        """Convolutions over patches as matrices; the class row as part of the position table."""
        patches = self._need(tensors, "patch_embed.weight")
        hp = self.hparams
        if patches.shape[0] * hp.patch_dim != patches.num_elements:
            raise ModelLoadError(
                f"{self.path}: tensor {patches.name!r} has shape {patches.shape}; expected "
                f"({hp.tower.hidden_size}, {hp.num_channels}, {hp.patch_size}, {hp.patch_size})"
            )
        tensors["patch_embed.weight"] = TensorRef(
            patches.name, (patches.shape[0], hp.patch_dim), patches.quant_type, patches.data
        )
        table = self._need(tensors, "embed_positions.weight")
        if table.shape[:-1] != (hp.tower.max_position_embeddings,):
            raise ModelLoadError(
                f"{self.path}: tensor {table.name!r} has shape {table.shape}; expected "
                f"({hp.tower.max_position_embeddings}, {hp.tower.hidden_size}) for "
                f"{hp.table_side} x {hp.table_side} patches"
            )
        if hp.has_class_row:
            class_row = self._need(tensors, "class_embedding")
            del tensors["class_embedding"]
            if table.shape[-1] != class_row.num_elements:
                raise ModelLoadError(
                    f"{self.path}: tensor {class_row.name!r} has shape {class_row.shape}; "
                    f"expected ({table.shape[-1]},)"
                )
            # A patch of zeros gives a row of zeros, so row 0 of the table makes the class row.
            values = np.array(dequantize(table), dtype=np.float32)
            values[0] += dequantize(class_row).reshape(-1)
            tensors["embed_positions.weight"] = _float32(table, values)
        return tensors

    def _turned(self, tensors: dict[str, TensorRef]) -> dict[str, TensorRef]:
        """The projector's matrix with a row for each output; files hold a row for each input."""
        name, hp = "projector_1.weight", self.hparams
        matrix = self._need(tensors, name)
        shape = (hp.tower.hidden_size, hp.text_hidden_size)
        if matrix.shape != shape:
            raise ModelLoadError(
                f"{self.path}: the image encoder's projection has shape {matrix.shape}; expected "
                f"{shape}, of the encoder's and the text model's hidden_size"
            )
        return tensors | {name: _float32(matrix, dequantize(matrix).T)}

    def _need(self, tensors: Mapping[str, TensorRef], name: str) -> TensorRef:
        if name not in tensors:
            raise ModelLoadError(
                f"{self.path}: the image encoder's tensor {name!r} is missing; "
                "limit_mm_per_prompt={'image': 0} runs the text model"
            )
        return tensors[name]


def _float32(tensor: TensorRef, values: Float32Array) -> TensorRef:
    """Other values in the place of a tensor's."""
    data = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8)
    return TensorRef(tensor.name, values.shape, QuantType.F32, data)


@dataclass(frozen=True)
class VisionFiles:
    """Where a model's image encoder is, and its dimensions."""

    path: Path
    """A folder, or a GGUF file."""
    hparams: VisionHParams
    image_settings: TypedMapping | None
    """How pictures are prepared; None = a file of the folder says it."""


def find_vision(path: Path, mmproj: Path | None = None) -> VisionFiles | None:
    """Look for the image encoder of the model at ``path``, without opening its weights.

    One that lies beside a GGUF model and does not run here is left alone, with a warning: the text
    model does.

    Args:
        path: a folder with safetensors, or a GGUF file.
        mmproj: GGUF file of the encoder; None = the one that lies beside a GGUF model.

    Returns:
        None for a model that has none.

    Raises: as `open_vision`.
    """
    path = locate_model(path)
    if path.is_dir():
        if mmproj is not None:
            raise ModelLoadError(f"{mmproj}: {path} has its image encoder in its own files")
        config = read_json_object(path / "config.json")
        hparams = vision_hparams(config, hparams_from_config(config))
        return None if hparams is None else VisionFiles(path, hparams, None)
    if mmproj is not None:
        return _find_gguf(path, mmproj)
    files = mmproj_files(path)
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        logger.warning("%s: several image encoders lie beside it (%s); images are off", path, names)
        return None
    try:
        return _find_gguf(path, files[0]) if files else None
    except UnsupportedModelError as error:
        logger.warning("images are off: %s", error)
        return None


def open_vision(path: Path, mmproj: Path | None = None) -> VisionSource | None:
    """Open the image encoder of the model at ``path``; None for a text model.

    Args: as `find_vision`.

    Raises:
        ModelNotFoundError: there is nothing at ``path``, or at ``mmproj``.
        ModelLoadError: what is there is damaged.
        UnsupportedModelError: a variant that does not run here.
    """
    found = find_vision(path, mmproj)
    if found is None:
        return None
    files: Sequence[SafetensorsFile | gguf.GGUFFile]
    if found.path.is_dir():
        files = open_safetensors(found.path, lambda name: not is_vision_hf_name(name))
    else:
        files = gguf.open_gguf(found.path)
    try:
        tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
        if found.path.is_dir():
            canonical = canonical_qwen_name if found.hparams.turns else _canonical
            tensors = {canonical(name): tensor for name, tensor in tensors.items()}
            norm = tensors.get("projector_norm.weight")
            if found.hparams.pools and norm is not None:
                # Gemma's norms are 1 and what the file has; in GGUF it is added.
                tensors["projector_norm.weight"] = _float32(norm, 1 + dequantize(norm))
        else:
            tensors = canonical_gguf_vision(tensors, found.hparams)
        return VisionSource(found.path, found.hparams, tensors, files)
    except BaseException:
        for file in files:
            file.close()
        raise


def _find_gguf(model: Path, mmproj: Path) -> VisionFiles:
    files = gguf.open_gguf(mmproj)
    try:
        metadata = files[0].metadata
        hparams = gguf_vision_hparams(model, metadata)
        return VisionFiles(mmproj, hparams, gguf_image_settings(metadata, hparams))
    finally:
        for file in files:
            file.close()


def _canonical(name: str) -> str:
    name = _PREFIX.sub("", name, count=1)
    for pattern, replacement in _NAMES:
        name = pattern.sub(replacement, name, count=1)
    return name
