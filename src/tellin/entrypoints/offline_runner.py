"""Runs the prompts of one call to the end, in order, with all-or-nothing or per-prompt errors.

Shared by all calls of an `LLM`. Knows requests and outputs, not what they are for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from tellin.engine.llm_engine import LLMEngine
from tellin.engine.output_processor import Output
from tellin.engine.prompts import RenderedPrompt
from tellin.engine.request_handle import RequestHandle
from tellin.entrypoints.engine_driver import EngineDriver, Inbox, lost_error
from tellin.entrypoints.progress import GenerationBar, UseTqdm, rendering
from tellin.exceptions import InvalidParameterError, TellinError
from tellin.outputs import CompletionOutput, PoolingOutput, PoolingRequestOutput, RequestOutput
from tellin.protocol import LoRARequest
from tellin.sampling_params import PoolingParams, SamplingParams

MAX_IMAGE_BYTES = 1 << 30
"""Pixels of unfinished requests of one call, before more prompts are prepared."""

OnError = Literal["raise", "return"]
Params = SamplingParams | PoolingParams
LoRAPerPrompt = LoRARequest | Sequence[LoRARequest | None] | None
PriorityPerPrompt = int | Sequence[int] | None


@dataclass
class Item:
    """One prompt of a call: what was asked, and its result."""

    prompt: Any
    params: Params | None = None
    handle: RequestHandle | None = None
    output: Output | None = None


@dataclass(frozen=True)
class RunOptions:
    """What a call says about all its prompts; scalars, or one value per prompt."""

    lora_request: LoRAPerPrompt = None
    priority: PriorityPerPrompt = None
    use_tqdm: UseTqdm = False
    on_error: OnError = "raise"

    def __post_init__(self) -> None:
        if self.on_error not in ("raise", "return"):
            raise InvalidParameterError(
                f"on_error must be 'raise' or 'return', got {self.on_error!r}",
                parameter="on_error",
                value=self.on_error,
            )


class OfflineRunner:
    """Submits prompts to an engine and collects their outputs. Thread-safe."""

    def __init__(self, engine: LLMEngine) -> None:
        self.driver = EngineDriver(engine)
        self._request_counter = itertools.count()

    def run(
        self,
        prompts: Sequence[Any],
        render: Callable[[Any], RenderedPrompt],
        params: Sequence[Params],
        options: RunOptions,
    ) -> list[Any]:
        """Outputs in the order of the prompts."""
        items = [Item(prompt) for prompt in prompts]
        inbox = Inbox()
        try:
            self.submit(items, render, params, options, inbox, MAX_IMAGE_BYTES)
            return self.collect(items, inbox, options)
        except BaseException:  # Ctrl-C may also come between the two
            self._abort(inbox, set())
            raise

    def submit(
        self,
        items: Sequence[Item],
        render: Callable[[Any], RenderedPrompt],
        params: Sequence[Params],
        options: RunOptions,
        inbox: Inbox,
        max_image_bytes: int | None = None,
    ) -> None:
        """Render and add each prompt before the next. All, or (with ``raise``) nothing is added.

        Args:
            max_image_bytes: once unfinished requests hold more pixels, the engine runs until some
                have ended: the images of a long list need not fit into memory together.

        Raises:
            RequestError: a prompt or parameter is not acceptable.
        """
        loras = one_per_prompt("lora_request", options.lora_request, len(items))
        priorities = one_per_prompt("priority", options.priority or 0, len(items))
        jobs = zip(items, params, loras, priorities, strict=True)
        earlier = set(inbox.handles)
        images = _ImageBytes(max_image_bytes)
        try:
            for item, param, lora, priority in rendering(jobs, len(items), options.use_tqdm):
                item.params = param
                try:
                    rendered = render(item.prompt)
                    item.handle = self.add(rendered, param, lora, priority, inbox)
                    images.add(item.handle, rendered)
                except TellinError as error:
                    if options.on_error == "raise":
                        raise
                    request_id = str(next(self._request_counter))
                    item.output = _error_output(item, request_id, error, "error")
                while images.are_too_many(inbox):
                    self.driver.wait(inbox)
                    images.set_aside(inbox)
        except BaseException:
            self._abort(inbox, earlier)
            raise
        images.put_back(inbox)

    def add(
        self,
        prompt: RenderedPrompt,
        params: Params,
        lora_request: LoRARequest | None,
        priority: int,
        inbox: Inbox,
    ) -> RequestHandle:
        """Add one request whose outputs go to ``inbox``."""
        request_id = str(next(self._request_counter))

        def add(engine: LLMEngine) -> RequestHandle:
            try:
                handle = engine.add_request(
                    request_id, prompt, params, lora_request=lora_request, priority=priority
                )
                self.driver.register(handle, inbox)
            except BaseException as error:
                if not isinstance(error, Exception):  # Ctrl-C, perhaps when it was just added
                    engine.abort_request(request_id)
                raise
            return handle

        return self.driver.call(add)

    def collect(self, items: Sequence[Item], inbox: Inbox, options: RunOptions) -> list[Output]:
        """Step the engine until all items have their output.

        Raises:
            TellinError: with ``raise``, that of the first request that failed; nothing is left.
        """
        try:
            return self._collect(items, inbox, options)
        except BaseException:
            self._abort(inbox, set())
            raise

    def _collect(self, items: Sequence[Item], inbox: Inbox, options: RunOptions) -> list[Output]:
        by_id = {item.handle.external_id: item for item in items if item.handle is not None}
        bar = GenerationBar(self._num_sequences(by_id), options.use_tqdm)
        num_open = len(by_id)
        try:
            while num_open:
                self.driver.wait(inbox)
                output = _next_output(inbox, by_id)
                if not output.finished:
                    continue
                if output.error is not None and options.on_error == "raise":
                    raise output.error
                by_id[output.request_id].output = output
                num_open -= 1
                bar.update(output)
        finally:
            bar.close()
        return [cast("Output", item.output) for item in items]

    def _num_sequences(self, by_id: Mapping[str, Item]) -> int:
        live = self.driver.engine.output_processor.external_req_ids
        return sum(len(live.get(request_id, ())) for request_id in by_id)

    def _abort(self, inbox: Inbox, spared: set[str]) -> None:
        """End what goes to ``inbox``, except for some external ids."""
        self.driver.abort([h for name, h in list(inbox.handles.items()) if name not in spared])


class _ImageBytes:
    """Pixels that the requests of a call hold, and the outputs that came while it went on."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._sizes: dict[str, int] = {}
        self._outputs: list[Output] = []
        self._lost: list[str] = []

    def add(self, handle: RequestHandle, prompt: RenderedPrompt) -> None:
        items = (prompt.get("mm_items") or {}).values()
        size = sum(getattr(data, "nbytes", 0) for item in items for data in item["data"])
        if size:
            self._sizes[handle.external_id] = size

    def are_too_many(self, inbox: Inbox) -> bool:
        """Whether requests must end before more are added."""
        if self._limit is None or not self._sizes:
            return False
        self._sizes = {i: size for i, size in self._sizes.items() if i in inbox.handles}
        return sum(self._sizes.values()) > self._limit

    def set_aside(self, inbox: Inbox) -> None:
        """Take the outputs out, so that the inbox can wait for more."""
        while inbox.outputs:
            self._outputs.append(inbox.outputs.popleft())
        while inbox.lost:
            self._lost.append(inbox.lost.popleft())

    def put_back(self, inbox: Inbox) -> None:
        """The outputs, in their order."""
        inbox.outputs.extendleft(reversed(self._outputs))
        inbox.lost.extendleft(reversed(self._lost))


def one_per_prompt(name: str, given: Any, num_prompts: int) -> list[Any]:
    """A scalar for all prompts, or a sequence with one for each.

    Raises:
        InvalidParameterError: the sequence has another length.
    """
    if isinstance(given, Iterable) and not isinstance(given, str | Mapping):
        values = list(given)
        if len(values) != num_prompts:
            raise InvalidParameterError(
                f"{name} has {len(values)} entries for {num_prompts} prompts; "
                "give one for all or one for each",
                parameter=name,
                value=len(values),
            )
        return values
    return [given] * num_prompts


def _next_output(inbox: Inbox, by_id: Mapping[str, Item]) -> Output:
    """Oldest output; that of a request which was aborted elsewhere is made up here."""
    if inbox.outputs:
        return inbox.outputs.popleft()
    request_id = inbox.lost.popleft()
    return _error_output(by_id[request_id], request_id, lost_error(request_id), "abort")


def _error_output(item: Item, request_id: str, error: TellinError, finish_reason: str) -> Output:
    """The result of a prompt that was refused, or ended without an output."""
    if isinstance(item.params, PoolingParams):
        return PoolingRequestOutput(
            request_id, PoolingOutput([]), [], True, error=error, finish_reason=finish_reason
        )
    return RequestOutput(
        request_id=request_id,
        prompt=item.prompt if isinstance(item.prompt, str) else None,
        prompt_token_ids=None,
        prompt_logprobs=None,
        outputs=[CompletionOutput(0, "", [], finish_reason=finish_reason)],
        finished=True,
        error=error,
    )
