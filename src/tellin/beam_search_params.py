"""Parameters of a search with beams.

Their rules are those of `tellin.sampling_params`, which is where other modules take them from: what
vLLM accepts is accepted, every value is checked, and what is refused is named.
"""

from __future__ import annotations

import msgspec

from tellin.checks import check_bool, check_float, check_int
from tellin.hinting import HintingMeta
from tellin.nested_params import StructuredOutputsParams


class BeamSearchParams(msgspec.Struct, metaclass=HintingMeta, omit_defaults=True):
    """How to search with beams.

    A beam's score is its cumulative logprob divided by ``length ** length_penalty``, where length
    counts prompt and output tokens without a final end-of-sequence token.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    """Text of a beam that has ended shows the end-of-sequence token."""
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        check_int("beam_width", self.beam_width, 1)
        check_int("max_tokens", self.max_tokens, 1)
        check_bool("ignore_eos", self.ignore_eos)
        check_bool("include_stop_str_in_output", self.include_stop_str_in_output)
        self.temperature = check_float("temperature", self.temperature, 0, 2)
        self.length_penalty = check_float("length_penalty", self.length_penalty, -100, 100)
