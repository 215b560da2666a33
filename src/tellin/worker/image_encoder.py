"""`ImageEncoder`: from the pixels of pictures to rows that the text model reads as embeddings.

Owns a backend for the tower and one for each projector. It knows no requests and keeps nothing:
`tellin.worker.image_inputs` does. A tile's rows depend on its own pixels only, so they have the
same bits whatever is encoded with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tellin.exceptions import EngineError
from tellin.kernels.batch import StepBatch
from tellin.loading.images import load_image_processor, normalise
from tellin.loading.vision import VisionSource, open_vision
from tellin.loading.vision_hparams import VisionHParams
from tellin.models.vision import build_vision_plans
from tellin.worker.backends import Backend, backend_class

if TYPE_CHECKING:
    from tellin.config import EngineConfig

Float32Array = npt.NDArray[np.float32]
Pixels = npt.NDArray[np.float32] | npt.NDArray[np.uint8]

Grid = tuple[int, int]

_ROWS_PER_PASS = 2048
"""Rows of the tower that are in memory at a time, unless a tile has more."""


class ImageEncoder:
    """Runs one model's image encoder.

    Args:
        source: the opened encoder; may be closed afterwards.
        backend: the class that runs plans.
        pixel_table: ``[3, 256]``: what bytes of pixels mean; None = they are given as floats.
        options: keyword arguments of the backend.
    """

    def __init__(
        self,
        source: VisionSource,
        backend: Any,
        *,
        pixel_table: Float32Array | None = None,
        **options: Any,
    ) -> None:
        self._pixel_table = pixel_table
        tower, projector, *taps = build_vision_plans(source)
        self.hparams: VisionHParams = source.hparams
        self._position_table = source.position_table
        self._tower: Backend = backend(tower, **options)
        self._projector: Backend = backend(projector, **options)
        self._taps: list[Backend] = [backend(tap, **options) for tap in taps]
        source.release_pages()

    @property
    def weight_bytes(self) -> int:
        """Bytes of packed weights."""
        return sum(int(backend.info["weight_bytes"]) for backend in self._backends())

    def _backends(self) -> tuple[Backend, ...]:
        return self._tower, self._projector, *self._taps

    def encode(self, pixels: Pixels, shapes: Sequence[Grid] | None = None) -> Float32Array:
        """Encode the tiles of a picture, or of several.

        Args:
            pixels: ``[num_tiles, num_patches, patch_dim]``: floats, or bytes that the table
                explains; see `tellin.loading.images.ProcessedImage`.
            shapes: rows and columns of each tile's result, for an encoder that takes tiles of any
                shape.

        Returns:
            ``[rows of all tiles, VisionHParams.row_width]``.

        Raises:
            EngineError: the pixels have another shape than this encoder takes.
        """
        self.check(pixels, shapes)
        if shapes is not None:
            size = self.hparams.group_side**2
            tiles = [
                self._encode_grid(self._floats(tile[: rows * columns * size]), (rows, columns))
                for tile, (rows, columns) in zip(pixels, shapes, strict=True)
            ]
            return np.concatenate(tiles)
        positions = tile_positions(self.hparams, _side(pixels))
        per_pass = max(1, _ROWS_PER_PASS // len(positions))
        parts = [
            self._encode(self._floats(pixels[i : i + per_pass]), positions)
            for i in range(0, len(pixels), per_pass)
        ]
        width = self.hparams.row_width
        return np.concatenate(parts) if parts else np.zeros((0, width), np.float32)

    def _floats(self, pixels: Pixels) -> Float32Array:
        if pixels.dtype != np.uint8:
            return np.asarray(pixels, np.float32)
        if self._pixel_table is None:
            raise EngineError("pixels came as bytes, but nothing says what they mean")
        return normalise(np.asarray(pixels, np.uint8), self._pixel_table)

    def rows_of_tiles(self, pixels: Pixels, shapes: Sequence[Grid] | None = None) -> list[int]:
        """Rows that `encode` makes of each tile."""
        if shapes is not None:
            return [rows * columns for rows, columns in shapes]
        return [self.hparams.embeds_per_tile(_side(pixels))] * len(pixels)

    def check(self, pixels: Pixels, shapes: Sequence[Grid] | None = None) -> None:
        """Refuse pixels that `encode` cannot take.

        Raises:
            EngineError: they have another shape than this encoder takes.
        """
        hp = self.hparams
        if hp.takes_grids or shapes is not None:
            self._check_shapes(pixels, shapes or ())
            return
        side = _side(pixels) if pixels.ndim == 3 else 0
        if pixels.ndim != 3 or pixels.shape[2] != hp.patch_dim or pixels.shape[1] != side**2:
            raise EngineError(
                f"pixels have shape {pixels.shape}; the image encoder takes square tiles of "
                f"patches with {hp.patch_dim} values"
            )
        if not 1 <= side <= hp.table_side or side % hp.group_side:
            raise EngineError(
                f"tiles are {side} patches wide; the image encoder takes at most {hp.table_side}, "
                f"in groups of {hp.group_side}"
            )
        if hp.pools and side != hp.table_side:
            raise EngineError(f"tiles are {side} patches wide, not {hp.table_side}")

    def _check_shapes(self, pixels: Pixels, shapes: Sequence[Grid]) -> None:
        hp = self.hparams
        areas = [rows * columns if min(rows, columns) > 0 else 0 for rows, columns in shapes]
        fits = pixels.ndim == 3 and (len(pixels), pixels.shape[2]) == (len(areas), hp.patch_dim)
        room = pixels.shape[1] // hp.group_side**2 if fits else 0
        if not hp.takes_grids or not areas or not 1 <= min(areas) <= max(areas) <= room:
            raise EngineError(
                f"pixels have shape {pixels.shape} and tiles of {list(shapes)} rows and columns, "
                "which this image encoder does not take"
            )

    def close(self) -> None:
        """Give the weights' memory back."""
        for backend in self._backends():
            backend.close()

    def _encode(self, pixels: Float32Array, positions: npt.NDArray[np.int32]) -> Float32Array:
        hp = self.hparams
        num_tiles, num_rows = len(pixels), len(positions)
        if hp.has_class_row:
            pixels = np.pad(pixels, ((0, 0), (1, 0), (0, 0)))
        rows = np.ascontiguousarray(pixels, np.float32).reshape(-1, hp.patch_dim)
        starts = np.arange(num_tiles + 1, dtype=np.int32) * num_rows
        states = self._tower.forward(_given(rows, np.tile(positions, num_tiles), starts))
        if hp.has_class_row and not hp.keeps_class_row:
            states = states.reshape(num_tiles, num_rows, -1)[:, 1:]
        states = np.ascontiguousarray(states)
        if hp.pools:
            groups = _means(states.reshape(-1, hp.group_side**2, hp.tower.hidden_size))
        else:
            groups = states.reshape(-1, hp.tower.hidden_size * hp.group_side**2)
        count = len(groups)
        order = np.arange(count, dtype=np.int32)
        step = _given(groups, order, np.array([0, count], np.int32))
        return np.array(self._projector.forward(step))

    def _encode_grid(self, pixels: Float32Array, grid: Grid) -> Float32Array:
        """A tile ``[num_patches, patch_dim]`` of any shape."""
        hp = self.hparams
        group = hp.group_side
        coordinates = grid_coordinates(grid, group)
        rows, cuts, order = pixels, None, None
        if self._position_table is not None:
            shape = grid[0] * group, grid[1] * group
            scaled = stretch if hp.turns else scale_smoothly
            places = scaled(self._position_table, coordinates, shape)
            rows = np.concatenate([pixels, places], axis=1)
        if hp.window_side:
            order, sizes = window_order(grid, hp.window_side)
            rows = _in_order(rows, order)
            coordinates = _in_order(coordinates, order)
            cuts = np.concatenate([[0], np.cumsum(sizes * group**2)]).astype(np.int32)
        count = len(rows)
        numbers, starts = np.arange(count, dtype=np.int32), np.array([0, count], np.int32)
        turned = np.ascontiguousarray(np.stack([numbers, *coordinates.T]), np.int32)
        step = replace(_given(rows, numbers, starts), rope_positions=turned, window_starts=cuts)
        projected = self._project(self._tower.forward(step))
        if order is None:
            return projected
        result = np.empty_like(projected)
        result[order] = projected
        return result

    def _project(self, states: Float32Array) -> Float32Array:
        """Rows for the text model of the tower's: of each projector, one behind the other."""
        hp = self.hparams
        hidden, size = hp.tower.hidden_size, hp.group_side**2
        count = len(states) // size
        order, starts = np.arange(count, dtype=np.int32), np.array([0, count], np.int32)
        parts = []
        for i, projector in enumerate(self._backends()[1:]):
            groups = states[:, i * hidden : (i + 1) * hidden].reshape(count, size * hidden)
            parts.append(np.array(projector.forward(_given(groups, order, starts))))
        return np.concatenate(parts, axis=1)


def grid_coordinates(grid: Grid, group: int) -> npt.NDArray[np.int32]:
    """``[num_patches, 2]`` row and column of every patch, group by group."""
    square = np.indices((grid[0] * group, grid[1] * group), np.int32)
    blocks = square.reshape(2, grid[0], group, grid[1], group).transpose(1, 3, 2, 4, 0)
    return np.ascontiguousarray(blocks).reshape(-1, 2)


def _in_order(rows: npt.NDArray[Any], groups: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """``rows`` with their groups, of equally many rows each, in another order."""
    return rows.reshape(len(groups), -1, rows.shape[1])[groups].reshape(rows.shape)


def window_order(grid: Grid, window: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Groups of a grid, window by window, and how many each window has.

    Windows are squares of ``window`` groups from the upper left corner on; those at the lower and
    right edges hold what is left.
    """
    numbers = np.arange(grid[0] * grid[1]).reshape(grid)
    windows = [
        numbers[row : row + window, column : column + window].reshape(-1)
        for row in range(0, grid[0], window)
        for column in range(0, grid[1], window)
    ]
    return np.concatenate(windows), np.array([len(part) for part in windows])


def stretch(
    table: Float32Array, coordinates: npt.NDArray[np.int32], shape: tuple[int, int]
) -> Float32Array:
    """Rows of a square ``table`` ``[side, side, width]`` laid over ``shape``, corner on corner.

    Between its places it is interpolated linearly.
    """
    last = table.shape[0] - 1
    at = coordinates * (np.float32(last) / np.maximum(np.array(shape, np.float32) - 1, 1))
    low = np.minimum(at.astype(np.int32), last)
    high = np.minimum(low + 1, last)
    (y, x), (up, right) = (at - low).astype(np.float32).T[:, :, None], high.T
    bottom, left = low.T
    near = table[bottom, left] * (1 - x) + table[bottom, right] * x
    far = table[up, left] * (1 - x) + table[up, right] * x
    return np.asarray(near * (1 - y) + far * y, np.float32)


def scale_smoothly(
    table: Float32Array, coordinates: npt.NDArray[np.int32], shape: tuple[int, int]
) -> Float32Array:
    """Rows of a square ``table`` ``[side, side, width]`` scaled to ``shape``, edge on edge.

    Each is a weighted mean: weights fall linearly to nothing at a distance of one place, or where
    places are more than what they become, at that of as many as become one.
    """
    side = table.shape[0]
    weights = []
    for size in shape:
        scale = np.float32(side / size)
        centres = (np.arange(size, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5)
        distances = np.abs(np.arange(side, dtype=np.float32) - centres[:, None])
        own = np.maximum(1 - distances / max(scale, np.float32(1)), 0)
        weights.append(own / own.sum(axis=1, keepdims=True))
    rows = np.tensordot(weights[0], table, axes=1)
    square = np.matmul(weights[1], rows)
    return np.asarray(square[coordinates[:, 0], coordinates[:, 1]], np.float32)


def _side(pixels: Pixels) -> int:
    """Patches on a side of a tile."""
    return math.isqrt(pixels.shape[1])


def tile_positions(hparams: VisionHParams, side: int) -> npt.NDArray[np.int32]:
    """Rows of the position table for a tile of ``side * side`` patches, in the order of pixels.

    A smaller tile takes the places of the table's square that lie at the same fractions of it.
    """
    table = hparams.table_side
    if hparams.has_class_row:
        return np.arange(side**2 + 1, dtype=np.int32)
    group = hparams.group_side
    if hparams.pools:  # of the whole table
        return _by_group(np.arange(side**2, dtype=np.int32).reshape(side, side), group)
    # In float32, as the models were trained: the rounding decides between neighbours.
    bounds = (np.arange(1, table) * (1.0 / table)).astype(np.float32)
    fractions = np.arange(side, dtype=np.float32) * np.float32(np.float32(1.0) / np.float32(side))
    fractions = np.minimum(fractions, np.float32(1.0 - 1e-6))
    places = np.searchsorted(bounds, fractions, side="right").astype(np.int32)
    square = places[:, None] * table + places[None, :]
    return _by_group(square, group)


def _by_group(square: npt.NDArray[np.int32], group: int) -> npt.NDArray[np.int32]:
    """A square's values group by group, row by row within each."""
    count = len(square) // group
    blocks = square.reshape(count, group, count, group)
    return np.ascontiguousarray(blocks.transpose(0, 2, 1, 3)).reshape(-1)


def _means(groups: Float32Array) -> Float32Array:
    """Means over axis 1, added in its order, so that each depends on its own values only."""
    total = groups[:, 0].copy()
    for index in range(1, groups.shape[1]):
        total += groups[:, index]
    return total / np.float32(groups.shape[1])


def _given(
    rows: Float32Array, positions: npt.NDArray[np.int32], starts: npt.NDArray[np.int32]
) -> StepBatch:
    """A step whose rows are all given; request r has rows ``starts[r]`` to ``starts[r + 1]``."""
    count, num_requests = len(rows), len(starts) - 1
    return StepBatch(
        token_ids=np.zeros(count, np.int32),
        positions=positions,
        query_start_loc=starts,
        seq_lens=np.diff(starts),
        block_table=np.zeros((num_requests, 1), np.int32),
        logits_indices=np.zeros(0, np.int32),
        embeds=rows,
        embed_rows=np.arange(count, dtype=np.int32),
    )


def open_image_encoder(config: EngineConfig) -> ImageEncoder | None:
    """The encoder of the configured model; None for an engine that takes text only.

    Raises:
        LoadError: the encoder cannot be loaded.
        OutOfMemoryError: its weights do not fit.
        EngineError: the model has none.
    """
    multimodal = config.multimodal_config
    if multimodal is None:
        return None
    model, parallel = config.model_config, config.parallel_config
    processor = load_image_processor(model.path, multimodal.mmproj, multimodal.processor_kwargs)
    source = open_vision(model.path, multimodal.mmproj)
    if source is None or processor is None:
        raise EngineError(f"{model.path}: pictures are on, but the model has no image encoder")
    try:
        return ImageEncoder(
            source,
            backend_class(model.backend),
            pixel_table=processor.pixel_table,
            num_threads=parallel.num_threads or config.settings.num_threads,
            isa=config.settings.isa,
            activation_precision=model.activation_precision,
        )
    finally:
        source.close()
