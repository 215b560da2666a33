"""`LLM`: a model in this process, for scripts, notebooks and batch jobs.

A thin layer over `LLMEngine.add_request` and `step`. Thread-safe: calls from several threads run at
the same time and share the engine's batches. Prints nothing unless asked (``use_tqdm=True``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tellin.config import EngineArgs
from tellin.engine.llm_engine import LLMEngine
from tellin.engine.output_processor import Output
from tellin.engine.prompts import (
    CHAT_TOKENIZE_PARAMS,
    COMPLETION_TOKENIZE_PARAMS,
    RenderedPrompt,
    conversations_to_list,
    prompts_to_list,
)
from tellin.engine.renderer import ChatParams
from tellin.entrypoints.beam_search import search_beams
from tellin.entrypoints.engine_driver import Inbox
from tellin.entrypoints.offline_runner import (
    Item,
    LoRAPerPrompt,
    OfflineRunner,
    OnError,
    PriorityPerPrompt,
    RunOptions,
    one_per_prompt,
)
from tellin.entrypoints.output_stream import OutputStream
from tellin.entrypoints.pooling import PoolingCalls
from tellin.entrypoints.progress import UseTqdm
from tellin.exceptions import InvalidParameterError, InvalidTypeError, UnsupportedFeatureError
from tellin.outputs import BeamSearchOutput, RequestOutput
from tellin.protocol import LoRARequest
from tellin.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams


class LLM(PoolingCalls):
    """A language model and the engine that runs it.

    Example:
        >>> from tellin import LLM, SamplingParams
        >>> with LLM("smollm2") as llm:
        ...     outputs = llm.generate(["The sea is"], SamplingParams(max_tokens=20))
        ...     print(outputs[0].outputs[0].text)
    """

    def __init__(
        self,
        model: str | Path,
        *,
        download: bool = False,
        max_model_len: int | None = None,
        seed: int | None = 0,
        num_threads: int | None = None,
        disable_log_stats: bool = True,
        **engine_args: Any,
    ) -> None:
        """Load a model.

        Args:
            model: a ``.gguf`` file, a safetensors folder, or the name of a pulled model.
            download: pull the model if it is not there yet.
            max_model_len: longest prompt + output in tokens; None = what model and memory allow.
            seed: makes requests without a seed of their own reproducible; None = they are not.
            num_threads: None = the physical cores that this process may use.
            disable_log_stats: no statistics (`get_metrics`, ``RequestOutput.metrics``).
            engine_args: any other field of `tellin.EngineArgs`.

        Raises:
            ModelNotFoundError, ModelLoadError, UnsupportedModelError, OutOfMemoryError: no engine.
            InvalidParameterError: an argument is unknown or has a bad value.
        """
        args = EngineArgs.from_dict(
            {
                **engine_args,
                "model": model,
                "download": download,
                "max_model_len": max_model_len,
                "seed": seed,
                "num_threads": num_threads,
                "disable_log_stats": disable_log_stats,
            }
        )
        if args.data_parallel_size > 1:
            raise InvalidParameterError(
                "LLM cannot run data_parallel_size > 1: it would wait for ranks that nobody runs; "
                "make one LLM per process",
                parameter="data_parallel_size",
                value=args.data_parallel_size,
            )
        self._start(LLMEngine.from_engine_args(args))

    def _start(self, engine: LLMEngine) -> None:
        self.llm_engine = engine
        self._runner = OfflineRunner(engine)
        self._enqueued = Inbox()
        self._enqueued_items: list[Item] = []

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> LLM:
        """An `LLM` of finished arguments."""
        return cls.from_engine(LLMEngine.from_engine_args(args))

    @classmethod
    def from_engine(cls, engine: LLMEngine) -> LLM:
        """An `LLM` around an engine that exists; it now belongs to the `LLM`."""
        llm = cls.__new__(cls)
        llm._start(engine)
        return llm

    # ------------------------------------------------------------------ generating

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = False,
        lora_request: LoRAPerPrompt = None,
        priority: PriorityPerPrompt = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Complete prompts. All of them run together.

        Args:
            prompts: a text, a list of token ids, a dict (``prompt`` or ``prompt_token_ids``, and
                ``multi_modal_data`` for models that see images: `TextPrompt`; or
                ``prompt_embeds``: `EmbedsPrompt`), or a list of such prompts.
            sampling_params: for all, or one per prompt; None = the model's own defaults.
            use_tqdm: show progress bars with tokens per second.
            lora_request: adapter for all, or one per prompt.
            priority: for all, or one per prompt; lower runs earlier with the priority policy.
            tokenization_kwargs: ``add_special_tokens``, ``truncate_prompt_tokens``,
                ``truncation_side``.
            on_error: ``raise`` the first error and complete nothing, or ``return`` an output with
                ``error`` set for each prompt that cannot be completed.

        Returns:
            One output per prompt, in order.

        Raises:
            RequestError: a prompt or parameter is not acceptable.
            RequestFailedError: the engine could not complete a request.
        """
        self._check_generates()
        items = prompts_to_list(prompts)
        params = self._sampling_params(sampling_params, len(items))
        options = RunOptions(lora_request, priority, use_tqdm, on_error)
        return self._runner.run(
            items, self._completion_renderer(tokenization_kwargs), params, options
        )

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = False,
        lora_request: LoRAPerPrompt = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        priority: PriorityPerPrompt = None,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Answer conversations.

        Args:
            messages: a conversation (a list of ``{"role": ..., "content": ...}``), or several.
            chat_template: Jinja text, instead of the model's.
            chat_template_content_format: string (parts of a message are joined), openai (the
                template gets the parts), or auto.
            continue_final_message: the model goes on with the last message; needs
                ``add_generation_prompt=False``.

        Other arguments, result and errors: as `generate`.
        """
        self._check_generates()
        chat_params = ChatParams(
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            content_format=chat_template_content_format,
        )
        items = conversations_to_list(messages)
        params = self._sampling_params(sampling_params, len(items))
        options = RunOptions(lora_request, priority, use_tqdm, on_error)
        render = self._chat_renderer(chat_params, tokenization_kwargs)
        return self._runner.run(items, render, params, options)

    def extract_reasoning(self, output: RequestOutput, index: int = 0) -> tuple[str | None, str]:
        """The thoughts of an answer, and what it says without them.

        Models show their thoughts in their own ways: between ``<think>`` and ``</think>``, or, as
        gpt-oss does, on a channel whose marks are special tokens and not in ``text``.

        Args:
            output: of `chat`, or of `generate` with a prompt in the model's chat format.
            index: which of its completions.

        Returns:
            Thoughts (None where there are none) and content, as the server gives them.

        Raises:
            InvalidParameterError: ``output`` has no such completion.
        """
        from tellin.entrypoints.reasoning import extract_reasoning

        return extract_reasoning(self, output, index)

    def stream(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        chat_params: ChatParams | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> OutputStream:
        """Complete one prompt, or answer one conversation, piece by piece.

        Each output holds what is new: ``output.text`` is the new text, joined they are the whole
        text. With ``n > 1`` an output holds a piece of one completion, ``output.outputs[0].index``
        says of which. Leaving the loop early and dropping the iterator aborts the request.

        Example:
            >>> for output in llm.stream([{"role": "user", "content": "Hi!"}]):
            ...     print(output.text, end="", flush=True)

        Raises:
            RequestError: the prompt or a parameter is not acceptable (now, not in the loop).
        """
        self._check_generates()
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], Mapping):
            render = self._chat_renderer(chat_params, tokenization_kwargs)
        else:
            render = self._completion_renderer(tokenization_kwargs)
        for name, value, kind in (
            ("sampling_params", sampling_params, SamplingParams),
            ("chat_params", chat_params, ChatParams),
        ):
            if value is not None and not isinstance(value, kind):
                raise InvalidTypeError(
                    f"{name} must be {kind.__name__}, got {type(value).__name__}",
                    parameter=name,
                    value=value,
                )
        params = (sampling_params or self.get_default_sampling_params()).clone()
        params.output_kind = RequestOutputKind.DELTA
        inbox = Inbox()
        handle = self._runner.add(render(prompt), params, lora_request, priority, inbox)
        return OutputStream(self._runner.driver, handle, inbox)

    def enqueue(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRAPerPrompt = None,
        priority: PriorityPerPrompt = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: UseTqdm = False,
    ) -> list[str]:
        """Submit prompts without running them; `wait_for_completion` does. Returns internal ids."""
        self._check_generates()
        render = self._completion_renderer(tokenization_kwargs)
        options = RunOptions(lora_request, priority, use_tqdm)
        return self._enqueue(prompts_to_list(prompts), render, sampling_params, options)

    def enqueue_chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_params: ChatParams | None = None,
        lora_request: LoRAPerPrompt = None,
        priority: PriorityPerPrompt = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: UseTqdm = False,
    ) -> list[str]:
        """As `enqueue`, for a conversation or several."""
        self._check_generates()
        render = self._chat_renderer(chat_params, tokenization_kwargs)
        options = RunOptions(lora_request, priority, use_tqdm)
        return self._enqueue(conversations_to_list(messages), render, sampling_params, options)

    def _enqueue(
        self,
        prompts: Sequence[Any],
        render: Callable[[Any], RenderedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        options: RunOptions,
    ) -> list[str]:
        items = [Item(prompt) for prompt in prompts]
        params = self._sampling_params(sampling_params, len(items))
        self._runner.submit(items, render, params, options, self._enqueued)
        self._enqueued_items.extend(items)
        return [str(item.handle) for item in items]

    def wait_for_completion(
        self, output_type: type[Output] | None = None, *, use_tqdm: UseTqdm = False
    ) -> list[Output]:
        """Run what was enqueued to the end; its outputs, in the order of submission.

        Raises:
            InvalidParameterError: an output is not of ``output_type``.
        """
        if output_type is not None and not isinstance(output_type, type):
            raise InvalidTypeError(
                f"output_type must be a class of outputs, got {output_type!r}",
                parameter="output_type",
                value=output_type,
            )
        items, self._enqueued_items = self._enqueued_items, []
        inbox, self._enqueued = self._enqueued, Inbox()
        outputs = self._runner.collect(items, inbox, RunOptions(use_tqdm=use_tqdm))
        for output in outputs:
            if output_type is not None and not isinstance(output, output_type):
                raise InvalidParameterError(
                    f"expected outputs of type {output_type.__name__}, got {type(output).__name__}",
                    parameter="output_type",
                )
        return outputs

    def beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams,
        lora_request: LoRAPerPrompt = None,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Find the best continuations instead of sampling one.

        Args:
            concurrency_limit: search this many prompts at the same time; None = all.

        Returns:
            For each prompt its best ``beam_width`` sequences, best first.
        """
        self._check_generates()
        return search_beams(self, prompts, params, lora_request, use_tqdm, concurrency_limit)

    # ------------------------------------------------------------------ parts

    def _completion_renderer(
        self, tokenization_kwargs: Mapping[str, Any] | None
    ) -> Callable[[Any], RenderedPrompt]:
        tok_params = COMPLETION_TOKENIZE_PARAMS.with_options(tokenization_kwargs)
        renderer = self.llm_engine.renderer
        return lambda prompt: renderer.render_cmpl([prompt], tok_params)[0]

    def _chat_renderer(
        self, chat_params: ChatParams | None, tokenization_kwargs: Mapping[str, Any] | None
    ) -> Callable[[Any], RenderedPrompt]:
        tok_params = CHAT_TOKENIZE_PARAMS.with_options(tokenization_kwargs)
        renderer = self.llm_engine.renderer
        return lambda messages: renderer.render_chat([messages], chat_params, tok_params)[1][0]

    def _sampling_params(
        self, given: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        """Clones, one per prompt, that emit nothing before the end."""
        params = self.get_default_sampling_params() if given is None else given
        result = []
        for item in one_per_prompt("sampling_params", params, num_prompts):
            if isinstance(item, SamplingParams):
                item = item.clone()
                item.output_kind = RequestOutputKind.FINAL_ONLY
            result.append(item)
        return result

    def _check_generates(self) -> None:
        if self.model_config.runner_type != "generate":
            raise UnsupportedFeatureError(
                "this model does not generate text; use embed(), classify(), score() or encode()"
            )

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        model = self.model_config
        return (
            f"LLM(model={model.model!r}, architecture={model.architecture!r}, "
            f"num_hidden_layers={model.num_hidden_layers}, hidden_size={model.hidden_size}, "
            f"max_model_len={model.max_model_len})"
        )
