"""Runs users' logits processors between the stages of the native sampler.

Owns the instances of the engine-wide classes and the order: masks and biases, engine-wide
processors that may change the argmax, callables of single requests, penalties, (greedy choice),
temperature and min-p, argmax-invariant processors, top-k, top-p, draw (core spec 3.6.6, 3.6.11). A
callable gets a copy of its row, so that nothing it keeps or breaks reaches another request. Its
exception ends its request; an engine-wide processor's ends the requests of the step.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tellin.exceptions import UnsupportedFeatureError
from tellin.kernels.sampler import RowStatus, Sampler, SampleResult, SampleRows, Stage
from tellin.logits_processor import BatchUpdate, LogitsProcessor, load_logits_processors

if TYPE_CHECKING:
    from tellin.config import EngineConfig
    from tellin.worker.input_batch import InputBatch, RequestState

logger = logging.getLogger("tellin.worker")

Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]
RowProcessor = Callable[[list[int], list[int], Float32Array], Any]

FAILED = -1
"""Status of rows that a processor failed; the sampler skips them."""


class LogitsProcessors:
    """Engine-wide processors and the callables of live requests."""

    def __init__(self, config: EngineConfig, sampler: Sampler) -> None:
        self._sampler = sampler
        self._raw_mode = config.model_config.logprobs_mode.startswith("raw")
        classes = load_logits_processors(config.model_config.logits_processors)
        if classes and config.speculative_config is not None:
            raise UnsupportedFeatureError(
                "engine-wide logits processors cannot be used with speculative decoding; "
                f"remove {classes[0].__name__} or speculative_config"
            )
        instances = [cls(config) for cls in classes]
        self._all = instances
        self._changing = [p for p in instances if not p.is_argmax_invariant()]
        self._invariant = [p for p in instances if p not in self._changing]
        self._of_request: dict[str, list[RowProcessor]] = {}
        self._broken: str | None = None

    @property
    def engine_wide(self) -> bool:
        """Whether there are processors that see every step."""
        return bool(self._all)

    @property
    def active(self) -> bool:
        """Whether anything may have to run between the sampler's stages."""
        return bool(self._all or self._of_request)

    def add_request(self, state: RequestState) -> None:
        """Take a request's callables; an unusable one becomes the request's error."""
        params = state.sampling_params
        if params is None or not params.logits_processors:
            return
        try:
            self._of_request[state.req_id] = [_adapt(f) for f in params.logits_processors]
        except (TypeError, ValueError) as error:
            state.error = f"logits_processors: {error}"

    def remove_request(self, req_id: str) -> None:
        """Forget a request's callables."""
        self._of_request.pop(req_id, None)

    def update_state(self, update: BatchUpdate | None) -> None:
        """Tell the engine-wide processors how the batch changed, before the forward pass."""
        self._broken = None
        for processor in self._all:
            try:
                processor.update_state(update)
            except Exception as error:
                self._broken = _describe(processor, error)

    def sample(
        self,
        logits: Float32Array,
        rows: SampleRows,
        batch: InputBatch,
        row_of: Int32Array,
        num_logprob_columns: int,
    ) -> tuple[SampleResult, dict[int, str]]:
        """Sample with processors.

        Args:
            logits: ``[>= num_rows, vocab_size]``.
            rows: rows to sample; row i is row i of ``logits``.
            batch: the batch they belong to.
            row_of: ``[num_rows]`` batch row of each of them.
            num_logprob_columns: as in `Sampler.sample`.

        Returns:
            The result, with status `FAILED` for rows a processor failed, and the reasons by row.
        """
        count = len(rows.slots)
        view = logits[:count, : self._sampler.num_ids]
        if num_logprob_columns > 0 and self._raw_mode:
            rows = replace(rows, raw=view.copy(), raw_rows=np.arange(count, dtype=np.int32))
        status = self._sampler.sample(logits, rows, stages=Stage.MASKS).status
        errors: dict[int, str] = {}
        if self._broken is not None:
            self._fail(range(count), self._broken, status, errors)
        self._apply(self._changing, view, row_of, batch.num_rows, status, errors)
        self._apply_callables(view, rows, batch, row_of, status, errors)
        if not self._invariant:
            return self._finish(logits, rows, num_logprob_columns, status), errors
        greedy = np.array([_is_greedy(batch.row_states[row]) for row in row_of.tolist()], bool)
        result = self._finish(logits, rows, num_logprob_columns, np.where(greedy, status, FAILED))
        chosen = result.status.copy()
        stages = Stage.PENALTIES | Stage.SCALE
        random = np.where(greedy, FAILED, status).astype(np.int32)
        self._sampler.sample(logits, rows, stages=stages, status=random)
        self._apply(self._invariant, view, row_of, batch.num_rows, random, errors)
        drawn = self._sampler.sample(
            logits,
            rows,
            num_logprob_columns=num_logprob_columns,
            stages=Stage.FINISH | Stage.SCALED,
            status=random,
        )
        _merge(drawn, result, greedy)
        drawn.status = np.where(greedy, chosen, drawn.status).astype(np.int32)
        return drawn, errors

    def _finish(
        self, logits: Float32Array, rows: SampleRows, columns: int, status: Int32Array
    ) -> SampleResult:
        return self._sampler.sample(
            logits,
            rows,
            num_logprob_columns=columns,
            stages=Stage.PENALTIES | Stage.FINISH,
            status=status.astype(np.int32),
        )

    def _apply(
        self,
        processors: Sequence[LogitsProcessor],
        view: Float32Array,
        row_of: Int32Array,
        num_rows: int,
        status: Int32Array,
        errors: dict[int, str],
    ) -> None:
        """Run engine-wide processors on the matrix of the whole batch.

        Requests that are not sampled in this step have rows of zeros in it, to be ignored.
        """
        if not processors or self._broken is not None:
            return
        whole = len(view) == num_rows
        matrix = view if whole else np.zeros((num_rows, view.shape[1]), np.float32)
        if not whole:
            matrix[row_of] = view
        for processor in processors:
            try:
                result = processor.apply(matrix)
                if result is not None and result is not matrix:
                    matrix[:] = result
            except Exception as error:
                self._fail(range(len(view)), _describe(processor, error), status, errors)
                return
        if not whole:
            view[:] = matrix[row_of]

    def _apply_callables(
        self,
        view: Float32Array,
        rows: SampleRows,
        batch: InputBatch,
        row_of: Int32Array,
        status: Int32Array,
        errors: dict[int, str],
    ) -> None:
        if not self._of_request:
            return
        for i, row in enumerate(row_of.tolist()):
            state = batch.row_states[row]
            processors = self._of_request.get(state.req_id)
            if not processors or status[i] != RowStatus.OK:
                continue
            prompt_len, length = int(rows.prompt_lens[i]), int(rows.history_lens[i])
            history = rows.history[state.slot]
            prompt = history[:prompt_len].tolist()
            output = history[prompt_len:length].tolist()
            for processor in processors:
                private = view[i].copy()
                try:
                    result = processor(prompt, output, private)
                    view[i] = private if result is None else result
                except Exception as error:
                    self._fail([i], _describe(processor, error), status, errors)
                    break

    @staticmethod
    def _fail(
        rows: Sequence[int], message: str, status: Int32Array, errors: dict[int, str]
    ) -> None:
        for i in rows:
            status[i] = FAILED
            errors[i] = message


def _merge(into: SampleResult, other: SampleResult, where: npt.NDArray[np.bool_]) -> None:
    """Take the rows of ``other`` selected by ``where``."""
    into.tokens[where] = other.tokens[where]
    for name in ("logprob_ids", "logprobs", "ranks"):
        target = getattr(into, name)
        if target is not None:
            target[where] = getattr(other, name)[where]


def _is_greedy(state: RequestState) -> bool:
    return state.sampling_params is not None and state.sampling_params.temperature == 0.0


def _adapt(function: Callable[..., Any]) -> RowProcessor:
    """Give a callable of (output_ids, row) the form (prompt_ids, output_ids, row).

    Raises:
        TypeError: it takes neither two nor three positional arguments.
    """
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(function).parameters.values())
    positional = [p for p in parameters if p.kind in kinds]
    required = [p for p in positional if p.default is inspect.Parameter.empty]
    starred = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
    if len(required) == 3 or (starred and len(positional) < 2):
        return function
    if len(required) <= 2 <= len(positional) or (starred and len(required) <= 2):

        def adapted(_prompt: list[int], output: list[int], row: Float32Array) -> Any:
            return function(output, row)

        adapted.__name__ = getattr(function, "__name__", type(function).__name__)
        return adapted
    raise TypeError(
        f"{function!r} must take (output_ids, logits) or (prompt_ids, output_ids, logits)"
    )


def _describe(processor: object, error: Exception) -> str:
    name = getattr(processor, "__name__", type(processor).__name__)
    logger.debug("logits processor %s failed", name, exc_info=error)
    return f"logits processor {name} raised {type(error).__name__}: {error}"
