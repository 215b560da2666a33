"""Beam search: many one-token requests per step, made affordable by the prefix cache.

Knows scores and beams; requests are run by the `LLM` like any others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tellin.checks import check_int
from tellin.engine.prompts import (
    COMPLETION_TOKENIZE_PARAMS,
    MultiModalItems,
    RenderedPrompt,
    prompts_to_list,
)
from tellin.entrypoints.offline_runner import LoRAPerPrompt, RunOptions, one_per_prompt
from tellin.entrypoints.progress import UseTqdm, rendering
from tellin.exceptions import InvalidParameterError, InvalidTypeError, UnsupportedFeatureError
from tellin.outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput
from tellin.protocol import LoRARequest
from tellin.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from tellin.entrypoints.llm import LLM


@dataclass
class _Search:
    """Beams of one prompt."""

    num_prompt_tokens: int
    lora_request: LoRARequest | None
    live: list[BeamSearchSequence]
    completed: list[BeamSearchSequence] = field(default_factory=list)
    mm_items: dict[str, MultiModalItems] = field(default_factory=dict)


def beam_score(
    beam: BeamSearchSequence, length_penalty: float, eos_token_ids: Collection[int]
) -> float:
    """Cumulative logprob / length ** length_penalty; a final end-of-sequence does not count."""
    length = len(beam.tokens)
    if beam.tokens and beam.tokens[-1] in eos_token_ids:
        length -= 1
    return beam.cum_logprob / math.pow(max(1, length), length_penalty)


def search_beams(
    llm: LLM,
    prompts: Any,
    params: BeamSearchParams,
    lora_request: LoRAPerPrompt,
    use_tqdm: UseTqdm,
    concurrency_limit: int | None,
) -> list[BeamSearchOutput]:
    """See `LLM.beam_search`."""
    if not isinstance(params, BeamSearchParams):
        raise InvalidTypeError(
            f"params must be BeamSearchParams, got {type(params).__name__}",
            parameter="params",
            value=params,
        )
    if concurrency_limit is not None:
        concurrency_limit = check_int("concurrency_limit", concurrency_limit, 1)
    if params.structured_outputs is not None:
        raise UnsupportedFeatureError("beam search does not support structured_outputs")
    _check_max_logprobs(llm, params.beam_width)
    prompt_list = prompts_to_list(prompts)
    if any(isinstance(p, Mapping) and p.get("prompt_embeds") is not None for p in prompt_list):
        raise UnsupportedFeatureError("beam search does not support prompt_embeds; give token ids")
    llm.get_tokenizer()  # texts are part of the result
    rendered = llm.llm_engine.renderer.render_cmpl(prompt_list, COMPLETION_TOKENIZE_PARAMS)
    loras = one_per_prompt("lora_request", lora_request, len(prompt_list))
    searches = [
        _Search(
            len(prompt["prompt_token_ids"]),
            lora,
            [BeamSearchSequence(list(prompt["prompt_token_ids"]))],
            mm_items=prompt.get("mm_items") or {},
        )
        for prompt, lora in zip(rendered, loras, strict=True)
    ]
    limit = concurrency_limit or len(searches) or 1
    for start in range(0, len(searches), limit):
        group = searches[start : start + limit]
        for _ in rendering(range(params.max_tokens), params.max_tokens, use_tqdm):
            if not any(search.live for search in group):
                break
            _advance(llm, group, params)
    return [_result(llm, search, params) for search in searches]


def _check_max_logprobs(llm: LLM, beam_width: int) -> None:
    """Each step asks for the best ``2 * beam_width`` tokens of a beam."""
    max_logprobs = llm.model_config.max_logprobs
    if 0 <= max_logprobs < 2 * beam_width:
        raise InvalidParameterError(
            f"beam_width={beam_width} needs max_logprobs={2 * beam_width} or more, but the engine "
            f"was started with {max_logprobs}; raise it (-1 = the vocabulary)",
            parameter="beam_width",
            value=beam_width,
        )


def _advance(llm: LLM, searches: Sequence[_Search], params: BeamSearchParams) -> None:
    """Extend every live beam of every search by one token."""
    max_model_len = llm.model_config.max_model_len
    for search in searches:  # beams that fill the context end here
        full = [beam for beam in search.live if len(beam.tokens) >= max_model_len]
        for beam in full:
            beam.finish_reason = "length"
        search.completed += full
        search.live = [beam for beam in search.live if len(beam.tokens) < max_model_len]
    beams = [(search, beam) for search in searches for beam in search.live]
    step_params = SamplingParams(
        max_tokens=1,
        temperature=params.temperature,
        logprobs=2 * params.beam_width,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    outputs: list[RequestOutput] = llm._runner.run(
        beams,
        _prompt,
        [step_params] * len(beams),
        RunOptions(lora_request=[search.lora_request for search, _ in beams]),
    )
    results = iter(zip((beam for _, beam in beams), outputs, strict=True))
    eos_token_ids = () if params.ignore_eos else llm.model_config.eos_token_ids
    for search in searches:
        candidates: list[BeamSearchSequence] = []
        for _ in range(len(search.live)):
            beam, output = next(results)
            for candidate in _extensions(beam, output):
                if candidate.tokens[-1] in eos_token_ids:
                    candidate.finish_reason = "stop"
                    search.completed.append(candidate)
                else:
                    candidates.append(candidate)
        search.live = _best(llm, candidates, params)


def _prompt(beam: tuple[_Search, BeamSearchSequence]) -> RenderedPrompt:
    """The prompt of a step: all of a beam so far, with the images of its search."""
    token_ids, mm_items = list(beam[1].tokens), beam[0].mm_items
    if not mm_items:
        return RenderedPrompt(type="token", prompt_token_ids=token_ids)
    return RenderedPrompt(type="multimodal", prompt_token_ids=token_ids, mm_items=mm_items)


def _extensions(beam: BeamSearchSequence, output: RequestOutput) -> Iterator[BeamSearchSequence]:
    logprobs = output.outputs[0].logprobs
    if not logprobs:
        return
    position = logprobs[0]
    for token_id, entry in position.items():
        yield BeamSearchSequence(
            tokens=[*beam.tokens, token_id],
            logprobs=[*beam.logprobs, position],
            cum_logprob=beam.cum_logprob + entry.logprob,
        )


def _best(
    llm: LLM, beams: Sequence[BeamSearchSequence], params: BeamSearchParams
) -> list[BeamSearchSequence]:
    eos_token_ids = llm.model_config.eos_token_ids
    ranked = sorted(
        beams, key=lambda beam: beam_score(beam, params.length_penalty, eos_token_ids), reverse=True
    )
    return ranked[: params.beam_width]


def _result(llm: LLM, search: _Search, params: BeamSearchParams) -> BeamSearchOutput:
    for beam in search.live:
        beam.finish_reason = "length"
    best = _best(llm, [*search.completed, *search.live], params)
    tokenizer = llm.get_tokenizer()
    for beam in best:
        beam.text = tokenizer.decode(beam.tokens[search.num_prompt_tokens :])
        if params.include_stop_str_in_output and beam.finish_reason == "stop":
            beam.text += tokenizer.decode(beam.tokens[-1:], skip_special_tokens=False)
    return BeamSearchOutput(best)
