"""One live sequence as the frontend sees it: its text, logprobs, and what was already sent of them.

Knows one request and its parent; the table of all requests is the output processor's.
"""

from __future__ import annotations

from operator import methodcaller
from typing import TYPE_CHECKING

from tellin.engine.detokenizer import Detokenizer
from tellin.engine.logprobs import LogprobsProcessor
from tellin.engine.parallel_sampling import ParentRequest
from tellin.engine.token_table import TokenTable
from tellin.exceptions import TellinError
from tellin.metrics import RequestStateStats
from tellin.outputs import (
    CompletionOutput,
    PoolingOutput,
    PoolingRequestOutput,
    PromptLogprobs,
    RequestOutput,
    SampleLogprobs,
)
from tellin.protocol import EngineCoreOutput, EngineCoreRequest, FinishReason
from tellin.sampling_params import RequestOutputKind

_copy = methodcaller("__copy__")
"""`copy.copy` of a struct, without its search for how to copy."""

if TYPE_CHECKING:
    from tellin.engine.output_processor import OutputQueue


class RequestState:
    """Progress of one request, or of one child of a parent."""

    __slots__ = (
        "_is_delta",
        "_is_final_only",
        "_num_sent_tokens",
        "_pooling_data",
        "_stream_interval",
        "arrival_time",
        "detokenizer",
        "error",
        "external_req_id",
        "index",
        "kv_transfer_params",
        "logprobs_processor",
        "lora_request",
        "num_cached_tokens",
        "num_truncated_prompt_tokens",
        "output_kind",
        "parent",
        "prompt",
        "prompt_token_ids",
        "queue",
        "request_id",
        "sampling_params",
        "stats",
        "trace_headers",
    )

    def __init__(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        token_table: TokenTable | None,
        *,
        parent: ParentRequest | None,
        index: int,
        queue: OutputQueue | None,
        stats: RequestStateStats | None,
        stream_interval: int,
        num_truncated_prompt_tokens: int,
    ) -> None:
        self.request_id = request.request_id
        self.external_req_id = request.external_req_id or request.request_id
        self.parent = parent
        self.index = index
        self.queue = queue
        self.stats = stats
        self.prompt = prompt
        known_ids = request.prompt_token_ids or []
        embeds = request.prompt_embeds
        self.prompt_token_ids = known_ids if embeds is None else [0] * len(embeds)
        self.arrival_time = request.arrival_time
        self.lora_request = request.lora_request
        self.trace_headers = request.trace_headers
        self.num_truncated_prompt_tokens = num_truncated_prompt_tokens
        self.output_kind = request.params.output_kind
        self.sampling_params = request.sampling_params
        self.detokenizer: Detokenizer | None = None
        self.logprobs_processor: LogprobsProcessor | None = None
        if request.sampling_params is not None:
            params = request.sampling_params
            self.detokenizer = Detokenizer.from_request(token_table, params, known_ids)
            if params.num_logprobs is not None or params.prompt_logprobs is not None:
                self.logprobs_processor = LogprobsProcessor(
                    params, token_table if params.detokenize else None
                )
        self.num_cached_tokens: int | None = None
        self.kv_transfer_params: dict[str, object] | None = None
        self.error: TellinError | None = None
        self._pooling_data: object = None
        self._stream_interval = stream_interval
        self._num_sent_tokens = 0
        self._is_delta = self.output_kind == RequestOutputKind.DELTA
        self._is_final_only = self.output_kind == RequestOutputKind.FINAL_ONLY

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def max_tokens_param(self) -> int | None:
        return None if self.sampling_params is None else self.sampling_params.max_tokens

    @property
    def lora_name(self) -> str | None:
        return None if self.lora_request is None else self.lora_request.lora_name

    # ------------------------------------------------------------------ taking

    def take(self, output: EngineCoreOutput) -> tuple[int, FinishReason | None, int | str | None]:
        """Take one output of the core.

        Returns:
            Number of its tokens that were kept, finish reason and stop reason: the core's, or those
            of a stop string found here.
        """
        if output.prefill_stats is not None:
            self.num_cached_tokens = output.prefill_stats.num_cached_tokens
        if output.kv_transfer_params is not None:
            self.kv_transfer_params = output.kv_transfer_params
        detokenizer = self.detokenizer
        if detokenizer is None or self.sampling_params is None:
            self._pooling_data = output.pooling_output
            return 0, output.finish_reason, output.stop_reason
        new_token_ids = output.new_token_ids
        finish_reason, stop_reason = output.finish_reason, output.stop_reason
        num_before = len(detokenizer.token_ids)
        drop_last_text = (
            finish_reason == FinishReason.STOP
            and bool(new_token_ids)
            and not self.sampling_params.include_stop_str_in_output
            and new_token_ids[-1] in self.sampling_params.all_stop_token_ids
        )
        stop = detokenizer.update(new_token_ids, drop_last_text, finish_reason is not None)
        num_kept = len(detokenizer.token_ids) - num_before
        if stop is not None:
            finish_reason, stop_reason = FinishReason.STOP, stop
        if self.logprobs_processor is not None:
            if output.new_prompt_logprobs is not None:
                self.logprobs_processor.update_prompt(output.new_prompt_logprobs)
            if output.new_logprobs is not None:
                self.logprobs_processor.update_sample(output.new_logprobs, num_kept)
        return num_kept, finish_reason, stop_reason

    def finish_text(self) -> None:
        """The request was aborted: release text that was held back."""
        if self.detokenizer is not None:
            self.detokenizer.finish()

    # ------------------------------------------------------------------ giving

    def make_output(
        self, finish_reason: FinishReason | None, stop_reason: int | str | None
    ) -> RequestOutput | PoolingRequestOutput | None:
        """What the user gets now; None if there is nothing to hand out yet."""
        finished = finish_reason is not None
        detokenizer = self.detokenizer
        if detokenizer is None:
            return self._make_pooling_output(finish_reason)
        if not finished and not self._must_emit(len(detokenizer.token_ids)):
            return None
        completion = self._make_completion(detokenizer, finish_reason, stop_reason)
        completions = [completion]
        if self.parent is not None:
            if self.error is not None and self.parent.error is None:
                self.parent.error = self.error
            completions, finished = self.parent.add_completion(self.request_id, completion)
            if not completions:
                return None
        return RequestOutput(
            request_id=self.external_req_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=None if self.logprobs_processor is None else self._prompt_logprobs(),
            outputs=completions,
            finished=finished,
            metrics=None if self.stats is None else _copy(self.stats),
            lora_request=self.lora_request,
            num_cached_tokens=self.num_cached_tokens,
            kv_transfer_params=self.kv_transfer_params,
            error=self.error if self.parent is None else self.parent.error,
            num_truncated_prompt_tokens=self.num_truncated_prompt_tokens,
            trace_headers=self.trace_headers,
        )

    def _must_emit(self, num_tokens: int) -> bool:
        if self._is_final_only:
            return False
        return (
            self._num_sent_tokens == 0
            or num_tokens - self._num_sent_tokens >= self._stream_interval
        )

    def _make_completion(
        self,
        detokenizer: Detokenizer,
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
    ) -> CompletionOutput:
        is_delta = self._is_delta
        start = self._num_sent_tokens if is_delta else 0
        self._num_sent_tokens = len(detokenizer.token_ids)
        processor = self.logprobs_processor
        logprobs: SampleLogprobs | None = None
        if processor is not None and processor.logprobs is not None:
            logprobs = processor.logprobs[start:]
        finished = finish_reason is not None
        return CompletionOutput(
            index=self.index,
            text=detokenizer.next_text(is_delta),
            token_ids=detokenizer.token_ids[start:],
            cumulative_logprob=None if processor is None else processor.cumulative_logprob,
            logprobs=logprobs,
            finish_reason=str(finish_reason) if finished else None,
            stop_reason=stop_reason if finished else None,
        )

    def _prompt_logprobs(self) -> PromptLogprobs | None:
        processor = self.logprobs_processor
        if processor is None:
            return None
        if self.output_kind == RequestOutputKind.CUMULATIVE:
            return processor.prompt_logprobs
        return processor.pop_prompt_logprobs()

    def _make_pooling_output(self, finish_reason: FinishReason | None) -> PoolingRequestOutput:
        data = self._pooling_data
        return PoolingRequestOutput(
            request_id=self.external_req_id,
            outputs=PoolingOutput([] if data is None else data),
            prompt_token_ids=self.prompt_token_ids,
            finished=finish_reason is not None,
            num_cached_tokens=self.num_cached_tokens,
            metrics=None if self.stats is None else _copy(self.stats),
            error=self.error,
            finish_reason=None if finish_reason is None else str(finish_reason),
            num_truncated_prompt_tokens=self.num_truncated_prompt_tokens,
            trace_headers=self.trace_headers,
        )
