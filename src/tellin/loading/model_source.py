"""`ModelSource`: an opened model, whatever its file format.

Owns the memory maps. Opening reads headers only; weights are views that are paged in when used.
A source never touches the network: `store.resolve_model` turns names into paths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Protocol

from tellin.exceptions import ModelLoadError, ModelNotFoundError, UnsupportedFeatureError
from tellin.loading import gguf
from tellin.loading.decoder_names import tensors_of_metadata
from tellin.loading.finite import is_finite
from tellin.loading.gguf_hparams import hparams_from_gguf
from tellin.loading.hf_hparams import hparams_from_config
from tellin.loading.hf_quant import assemble
from tellin.loading.hf_quant_config import quant_config
from tellin.loading.json_file import is_file, read_json_object
from tellin.loading.model_metadata import (
    ModelMetadata,
    metadata_from_folder,
    metadata_from_gguf,
)
from tellin.loading.names import (
    canonical_from_gguf,
    canonical_from_hf,
    is_dropped_hf_name,
    is_mmproj_name,
    is_never_read_hf_name,
)
from tellin.loading.safetensors import RawTensor, open_safetensors
from tellin.loading.tensors import ModelHParams, TensorRef
from tellin.loading.token_head import head_of_folder, head_of_gguf
from tellin.loading.typed_mapping import TypedMapping

if TYPE_CHECKING:
    from tellin.loading.tokenizer import Tokenizer


class WeightFile(Protocol):
    """What a source needs of an opened file."""

    @property
    def num_bytes(self) -> int: ...

    def release_pages(self, tensor: TensorRef | None = None) -> bool: ...

    def close(self) -> None: ...


class ModelSource:
    """An opened model: ``hparams``, ``tensors`` under canonical names, ``metadata``, tokenizer.

    Made by `open_model`. `close` (or the end of a ``with``) lets go of the files; tensors that are
    still held stay valid, and memory is unmapped with the last of them. Not for use by several
    threads at once; tensors may be.
    """

    def __init__(
        self,
        path: Path,
        hparams: ModelHParams,
        tensors: Mapping[str, TensorRef],
        files: Sequence[WeightFile],
        gguf_metadata: TypedMapping | None,
    ) -> None:
        self.path = path
        self.hparams = hparams
        self.num_bytes = sum(file.num_bytes for file in files)
        self._tensors: Mapping[str, TensorRef] = MappingProxyType(dict(tensors))
        self._files: tuple[WeightFile, ...] = tuple(files)
        self._is_closed = False
        self._gguf_metadata = gguf_metadata

    @property
    def tensors(self) -> Mapping[str, TensorRef]:
        """Weights by canonical name (see `tellin.loading.names`)."""
        self._require_open()
        return self._tensors

    @cached_property
    def metadata(self) -> ModelMetadata:
        self._require_open()
        if self._gguf_metadata is not None:
            return metadata_from_gguf(self.path, self._gguf_metadata, self.hparams, self.num_bytes)
        return metadata_from_folder(self.path, self.hparams, self.num_bytes)

    def load_tokenizer(self) -> Tokenizer:
        """Build the model's tokenizer.

        Raises:
            ModelLoadError: the model has none, or it is damaged.
            UnsupportedModelError: its kind is not supported.
        """
        from tellin.loading.tokenizer import tokenizer_from_folder, tokenizer_from_gguf

        self._require_open()
        if self._gguf_metadata is not None:
            return tokenizer_from_gguf(self._gguf_metadata)
        return tokenizer_from_folder(self.path)

    def check_weights(self) -> None:
        """Look for NaN and infinity in all weights; reads every file once.

        Raises:
            ModelLoadError: a tensor holds one; the message names it.
        """
        for tensor in self.tensors.values():
            if not is_finite(tensor):
                raise ModelLoadError(
                    f"{self.path}: tensor {tensor.name!r} holds NaN or infinity; "
                    "the file is damaged, or was badly converted"
                )

    def release_pages(self, tensor: TensorRef | None = None) -> None:
        """Let the system drop the pages of one tensor, or of all files, from this process.

        Contents stay readable. Call it for a tensor that was copied into packed form.
        """
        for file in self._files:
            if file.release_pages(tensor) and tensor is not None:
                return

    def close(self) -> None:
        """Let go of the files. Idempotent."""
        for file in self._files:
            file.close()
        self._files = ()
        self._tensors = {}
        self._gguf_metadata = None
        self._is_closed = True

    def _require_open(self) -> None:
        if self._is_closed:
            raise ValueError(f"{self.path}: the model was closed")

    def __enter__(self) -> ModelSource:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def open_model(path: Path | str) -> ModelSource:
    """Open a ``.gguf`` file (any part of a split one), or a folder with safetensors or a GGUF file.

    Raises:
        ModelNotFoundError: there is nothing at ``path``.
        ModelLoadError: what is there is damaged or no model; file and fault are named.
        UnsupportedModelError: the architecture or a storage type is not supported.
    """
    return _open(Path(path), of_predictor=False)


def open_predictor(path: Path | str) -> ModelSource:
    """Open what of a model's files belongs to its layer that predicts one token more.

    Its tensors are those of `tellin.loading.predictor`; the model's embedding, norm and head.

    Raises:
        UnsupportedFeatureError: the model has no such layer.
        ModelNotFoundError, ModelLoadError, UnsupportedModelError: as `open_model`.
    """
    source = _open(Path(path), of_predictor=True)
    hparams = source.hparams
    if f"layers.{hparams.num_hidden_layers}.eh_proj.weight" in source.tensors:
        return source
    source.close()
    raise UnsupportedFeatureError(
        f"{path}: this file of architecture {hparams.architecture!r} has no layer that predicts "
        "further tokens, which speculative_config.method 'mtp' drafts with; use 'ngram' or 'suffix'"
    )


def _open(path: Path, of_predictor: bool) -> ModelSource:
    path = locate_model(path)
    return _open_folder(path, of_predictor) if path.is_dir() else _open_gguf(path, of_predictor)


def open_metadata(path: Path | str) -> ModelMetadata:
    """Read a model's metadata; touches no weights, keeps nothing open. Raises: as `open_model`."""
    with open_model(path) as source:
        return source.metadata


def locate_model(path: Path) -> Path:
    """The file or folder that holds the model named by ``path``: a GGUF file, or a folder that has
    a ``config.json``.

    Raises:
        ModelNotFoundError: there is nothing at ``path``, or nothing like a model.
    """
    if path.is_dir():
        return path if is_file(path / "config.json") else _only_gguf(path)
    if not is_file(path):
        raise ModelNotFoundError(f"{path}: no such file or folder")
    if path.suffix == ".safetensors":
        if is_file(path.parent / "config.json"):
            return path.parent
        raise ModelNotFoundError(f"{path}: a safetensors model needs a config.json beside it")
    return path


def _only_gguf(folder: Path) -> Path:
    files = sorted(path for path in folder.glob("*.gguf") if path.is_file())
    models = [p for p in files if not gguf.is_later_part(p) and not is_mmproj_name(p.name)]
    if not models:
        raise ModelNotFoundError(f"{folder}: has neither a config.json nor a .gguf file")
    if len(models) > 1:
        names = ", ".join(path.name for path in models)
        raise ModelNotFoundError(f"{folder}: has several models; name one of {names}")
    return models[0]


def _open_gguf(path: Path, of_predictor: bool) -> ModelSource:
    files = gguf.open_gguf(path)
    try:
        metadata = files[0].metadata
        tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
        hparams = hparams_from_gguf(metadata, tensors)
        canonical = canonical_from_gguf(path, hparams, tensors, of_predictor)
        if not of_predictor:
            canonical |= tensors_of_metadata(metadata, hparams)
            canonical |= head_of_gguf(metadata, canonical)
        return ModelSource(files[0].path, hparams, canonical, files, metadata)
    except BaseException:
        for file in files:
            file.close()
        raise


def _open_folder(folder: Path, of_predictor: bool) -> ModelSource:
    config = read_json_object(folder / "config.json")
    hparams = hparams_from_config(config)
    quantisation = quant_config(config)
    is_dropped = is_never_read_hf_name if of_predictor else is_dropped_hf_name
    files = open_safetensors(folder, is_dropped, with_raw=quantisation is not None)
    try:
        tensors: dict[str, TensorRef] = {}
        raw: dict[str, RawTensor] = {}
        for file in files:
            tensors |= file.tensors
            raw |= file.raw
        if quantisation is not None:
            tensors = assemble(folder, quantisation, tensors, raw)
        if not tensors:
            raise ModelLoadError(f"{folder}: its safetensors files hold no tensors")
        canonical = canonical_from_hf(folder, hparams, tensors, of_predictor)
        if not of_predictor:
            canonical |= head_of_folder(folder, config, canonical)
        return ModelSource(folder, hparams, canonical, files, None)
    except BaseException:
        for file in files:
            file.close()
        raise
