"""Parameters that are the value of a request's parameter, with fields of their own.

They hold what the output must look like, and when it has repeated itself enough. They check
themselves as `tellin.sampling_params`, which is where other modules take them from, and name a
field by its path (``structured_outputs.json``). Validation runs again when an object is decoded.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tellin.checks import check_bool, check_int, check_str_list
from tellin.exceptions import InvalidParameterError, InvalidTypeError
from tellin.hinting import HintingMeta


class StructuredOutputsParams(msgspec.Struct, metaclass=HintingMeta, omit_defaults=True):
    """A constraint on the output: exactly one of the first six fields is set."""

    json: str | dict[str, Any] | None = None
    """A JSON schema, as text or as an object."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """A Lark or EBNF grammar."""
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        kinds = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        given = [name for name in kinds if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidParameterError(
                f"structured_outputs needs exactly one of {', '.join(kinds)}; "
                f"got {', '.join(given) or 'none'}",
                parameter="structured_outputs",
                value=given,
            )
        self._check_value(given[0])
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            check_bool(f"structured_outputs.{name}", getattr(self, name))
        if not isinstance(self.whitespace_pattern, str | None):
            raise InvalidTypeError(
                "structured_outputs.whitespace_pattern must be a string, got "
                f"{self.whitespace_pattern!r:.80}",
                parameter="structured_outputs.whitespace_pattern",
                value=self.whitespace_pattern,
            )

    def _check_value(self, name: str) -> None:
        value = getattr(self, name)
        parameter = f"structured_outputs.{name}"
        expected = "a string"
        if name == "json":
            right_type: bool = isinstance(value, str | dict)
            expected = "a JSON schema, as a dict or as text (of a pydantic model: its "
            expected += "model_json_schema())"
        elif name == "choice":
            self.choice = check_str_list(parameter, value)
            right_type = not isinstance(value, str)
            expected = "a list of strings"
        elif name == "json_object":
            right_type = isinstance(value, bool)
            expected = "a bool"
        else:
            right_type = isinstance(value, str)
        if not right_type:
            raise InvalidTypeError(
                f"{parameter} must be {expected}, got {value!r:.80}",
                parameter=parameter,
                value=value,
            )
        blank = isinstance(value, str) and not value.strip()
        if value is False or value in ([], ()) or (blank and name != "regex"):
            raise InvalidParameterError(
                f"{parameter} must not be empty or false, got {value!r}",
                parameter=parameter,
                value=value,
            )

    @property
    def kind(self) -> str:
        """Name of the field that is set."""
        kinds = ("json", "regex", "choice", "grammar", "json_object")
        return next((k for k in kinds if getattr(self, k) is not None), "structural_tag")


class RepetitionDetectionParams(msgspec.Struct, metaclass=HintingMeta, omit_defaults=True):
    """End a request that repeats itself.

    It ends (finish reason ``repetition``) when the last ``min_count * p`` output tokens are
    ``min_count`` copies of ``p`` tokens, for some p in ``[min_pattern_size, max_pattern_size]``.
    """

    max_pattern_size: int = 0
    """Longest pattern looked for, in tokens; 0 = off."""
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        prefix = "repetition_detection."
        check_int(prefix + "max_pattern_size", self.max_pattern_size, 0)
        check_int(prefix + "min_pattern_size", self.min_pattern_size, 0)
        check_int(prefix + "min_count", self.min_count, 0)
        if self.min_pattern_size > self.max_pattern_size:
            raise InvalidParameterError(
                f"{prefix}min_pattern_size ({self.min_pattern_size}) must not exceed "
                f"max_pattern_size ({self.max_pattern_size})",
                parameter=prefix + "min_pattern_size",
                value=self.min_pattern_size,
            )
        if self.max_pattern_size > 0 and self.min_count < 2:
            raise InvalidParameterError(
                f"{prefix}min_count must be at least 2, got {self.min_count}",
                parameter=prefix + "min_count",
                value=self.min_count,
            )
