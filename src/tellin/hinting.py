"""A metaclass for parameters that users write by hand: a wrong name is answered with the right one.

Construction by keyword is all that it changes; decoding from the wire does not pass through it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from tellin.exceptions import InvalidTypeError


class HintingMeta(msgspec.StructMeta):
    """Names the nearest parameter where an unknown one is given."""

    if not TYPE_CHECKING:  # checkers and editors are to see the constructor itself

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
            try:
                return super().__call__(*args, **kwargs)
            except TypeError:
                fields = cls.__struct_fields__
                unknown = next((name for name in kwargs if name not in fields), None)
                if unknown is None:
                    raise
                raise unknown_parameter(cls.__name__, unknown, fields) from None


_ELSEWHERE = {
    "guided_decoding": "write structured_outputs",
    "normalize": "write use_activation",
    "routed_experts_prompt_start": "which experts were used is not told; leave it out",
    "truncate_prompt_tokens": "give it to the call, in tokenization_kwargs",
    "use_beam_search": "call LLM.beam_search",
}
"""Parameters of vLLM's, of this version or earlier ones, and what to do instead."""


def unknown_parameter(owner: str, name: str, known: Iterable[str]) -> InvalidTypeError:
    """The error for a parameter that does not exist."""
    near = difflib.get_close_matches(name, list(known), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    if name in _ELSEWHERE:
        hint = f": {_ELSEWHERE[name]}"
    return InvalidTypeError(f"{owner} has no parameter {name!r}{hint}", parameter=name)
