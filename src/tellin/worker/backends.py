"""What a worker needs of a backend, and how one is opened."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from tellin.exceptions import InvalidParameterError
from tellin.kernels.batch import StepBatch
from tellin.models.plan.ir import AddTokenTypeEmbedding, Plan, Rows

if TYPE_CHECKING:
    from tellin.config import EngineConfig


class Backend(Protocol):
    """Runs a model's plan (see `tellin.kernels`)."""

    info: dict[str, Any]

    def kv_bytes_per_block(self) -> int:
        """Bytes of one KV block, all layers together."""

    def init_kv_cache(self, num_blocks: int) -> None:
        """Make the KV pool."""

    def free_kv_cache(self) -> None:
        """Give the KV pool's memory back."""

    def state_bytes_per_slot(self) -> int:
        """Bytes of one request's recurrent state, all layers together; 0 = the plan has none."""

    def init_state_cache(self, num_slots: int) -> None:
        """Make the pool of recurrent states."""

    def free_state_cache(self) -> None:
        """Give the states' memory back."""

    def copy_states(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy states from slot to slot, one after the other."""

    def copy_kv_blocks(self, src_dst_pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks of all layers, one after the other."""

    def forward(self, batch: StepBatch) -> npt.NDArray[np.float32]:
        """Logits ``[num_logits, vocab_size]``: a view that the next call overwrites."""

    def hidden(self) -> npt.NDArray[np.float32]:
        """Final hidden states of the last step: a row per token, or per logits index."""

    def close(self) -> None:
        """Give all memory back."""


def hidden_rows_are_tokens(backend: Backend) -> bool:
    """Whether `Backend.hidden` has a row per token; else it has one per logits index."""
    plan: Plan = backend.plan  # type: ignore[attr-defined]
    return plan.hidden is not None and plan.hidden.rows is Rows.TOKENS


def has_token_types(backend: Backend) -> bool:
    """Whether the model tells the tokens of a pair's texts apart by an input of their own."""
    plan: Plan | None = getattr(backend, "plan", None)
    return plan is not None and any(isinstance(op, AddTokenTypeEmbedding) for op in plan.ops)


def block_maxima(backend: Backend | None) -> npt.NDArray[np.float32] | None:
    """`NativeBackend.block_maxima` of the last pass; None from backends that do not find them."""
    find: Callable[[], npt.NDArray[np.float32] | None] | None
    find = getattr(backend, "block_maxima", None)
    return None if find is None else find()


def open_backend(config: EngineConfig, path: Path) -> Backend:
    """Open a model's file and pack its weights for the configured backend.

    Raises:
        LoadError: the file is missing, damaged or of a kind that is not supported.
        OutOfMemoryError: the weights do not fit.
    """
    from tellin import loading, models

    model, spec = config.model_config, config.speculative_config
    drafts_itself = spec is not None and spec.method == "mtp"
    if drafts_itself:
        loading.open_predictor(path).close()  # missing, it is missed before the weights are packed
    source = loading.open_model(path)
    try:
        backend: Backend = backend_class(model.backend)(
            models.build_plan(
                source,
                max_model_len=model.max_model_len,
                pooling=model.runner_type == "pooling",
                max_lora_rank=None
                if config.lora_config is None
                else config.lora_config.max_lora_rank,
                all_hidden=drafts_itself,
            ),
            **backend_options(config),
        )
    finally:
        source.release_pages()
    return backend


def backend_options(config: EngineConfig) -> dict[str, Any]:
    """What a backend is made with, besides its plan."""
    return {
        "num_threads": config.parallel_config.num_threads or config.settings.num_threads,
        "isa": config.settings.isa,
        "activation_precision": config.model_config.activation_precision,
        "kv_cache_dtype": config.cache_config.kv_cache_dtype,
        "block_size": config.cache_config.block_size,
    }


def backend_class(name: str) -> Any:
    """Backend class for ``model_config.backend``.

    Raises:
        InvalidParameterError: no such backend.
    """
    if name == "native":
        from tellin.kernels.native import NativeBackend

        return NativeBackend
    if name == "reference":
        from tellin.kernels.reference import ReferenceBackend

        return ReferenceBackend
    raise InvalidParameterError(
        f"backend must be 'native' or 'reference', got {name!r}", parameter="backend", value=name
    )
