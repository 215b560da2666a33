"""Grammars by `llguidance`: the vocabulary as bytes, matchers, and their masks.

The only module of the core that uses numpy: a mask is an int32 array that the worker reads. Errors
inside a matcher (a resource limit, a token it does not allow) are states of `llguidance`, not
exceptions; every call here looks at them, because a matcher in error allows the end of the text.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper

from tellin.config import EngineConfig
from tellin.core.structured_output import Grammar
from tellin.exceptions import InvalidParameterError
from tellin.grammar_validation import (
    build_grammar,
    make_matcher,
    matcher_error,
    on_deep_stack,
)
from tellin.sampling_params import StructuredOutputsParams

Bitmask = npt.NDArray[np.int32]
"""``[rows, ceil(vocab_size / 32)]``, least significant bit first, 1 = allowed."""

MAX_PIECE_BYTES = 64

MAX_SECONDS = 1.0
"""Processor time that a request's grammar may take in all before it is looked at how fast it is."""

MAX_SECONDS_PER_TOKEN = 0.01
"""From then on it may take so much per token, or it is broken off: the work of a very ambiguous
grammar grows with the square of the text, and the requests beside it wait."""

MIN_PARALLEL_ROWS = 16
"""Fewer masks are computed one after the other: handing them out costs more."""


class GuidanceBackend:
    """Compiles for one vocabulary.

    ``tokenizer`` has ``eos_token_id``, ``all_special_ids``, ``token_bytes()`` (by id, None for ids
    without bytes), ``convert_ids_to_tokens(ids)`` and ``encode(text, add_special_tokens=...)``.
    """

    def __init__(self, config: EngineConfig, tokenizer: Any) -> None:
        self._disable_any_whitespace = config.structured_outputs_config.disable_any_whitespace
        self._num_words = -(-config.model_config.vocab_size // 32)
        eos_ids = config.model_config.eos_token_ids or (tokenizer.eos_token_id,)
        self._eos_ids = frozenset(i for i in eos_ids if i is not None)
        vocabulary = _Vocabulary(tokenizer, config.model_config.vocab_size, self._eos_ids)
        self._special_tokens = vocabulary.special_tokens
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(vocabulary), eos_token=sorted(self._eos_ids) or None
        )
        self._thoughts = _all_but(self._eos_ids, config.model_config.vocab_size)
        self._executor: LLExecutor | None = None
        self._num_threads = max(1, min(8, (os.cpu_count() or 1) // 2))

    def compile(self, params: StructuredOutputsParams) -> Callable[[], Grammar]:
        """A factory of matchers for the constraint.

        Raises:
            InvalidParameterError: it does not compile, or this vocabulary cannot satisfy it.
        """
        text = on_deep_stack(
            lambda: build_grammar(
                params,
                disable_any_whitespace=self._disable_any_whitespace,
                special_tokens=self._special_tokens,
            )
        )
        template = on_deep_stack(lambda: make_matcher(text, self._tokenizer))
        if isinstance(template, str):
            parameter = f"structured_outputs.{params.kind}"
            raise InvalidParameterError(
                f"{parameter} cannot be used: {template}", parameter=parameter
            )
        return lambda: GuidanceGrammar(template.deep_copy(), self._eos_ids)

    def allocate_bitmask(self, num_rows: int) -> Bitmask:
        """Masks that allow nothing: a row nobody fills stays closed."""
        return np.zeros((num_rows, self._num_words), np.int32)

    def fill_bitmasks(self, grammars: Sequence[tuple[Grammar, int]], bitmask: Bitmask) -> None:
        """Fill one row for each of several grammars, in parallel when it pays."""
        if len(grammars) < MIN_PARALLEL_ROWS or self._num_threads == 1:
            for grammar, row in grammars:
                grammar.fill_bitmask(bitmask, row)
            return
        if self._executor is None:
            self._executor = LLExecutor(self._num_threads)
        matchers = [
            (grammar.matcher, row)
            for grammar, row in grammars
            if isinstance(grammar, GuidanceGrammar)
        ]
        row_bytes = bitmask.shape[1] * bitmask.itemsize
        self._executor.unsafe_compute_mask_ptr(
            matchers, bitmask.ctypes.data, row_bytes, bitmask.shape[0]
        )

    def fill_thoughts(self, bitmask: Bitmask, row: int) -> None:
        """Everything but the end: a text that ended in its thoughts would hold no answer."""
        bitmask[row] = self._thoughts


def _all_but(ids: frozenset[int], vocab_size: int) -> Bitmask:
    """A row that allows all ids but these."""
    allowed = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    allowed[:vocab_size] = True
    allowed[sorted(i for i in ids if i < vocab_size)] = False
    return np.packbits(allowed, bitorder="little").view(np.int32)


class GuidanceGrammar:
    """State of one request."""

    def __init__(self, matcher: LLMatcher, eos_ids: frozenset[int]) -> None:
        self.matcher = matcher
        self._eos_ids = eos_ids
        self._error = ""
        self._ended = False
        self._is_too_slow = False
        self._seconds = 0.0
        self._num_tokens = 0

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        """Advance; False when an id is refused. The end of the sequence may only come last."""
        ids = list(token_ids)
        ends = bool(ids) and ids[-1] in self._eos_ids
        if ends:
            ids.pop()  # a matcher that is complete does not take it
        num_accepted = 0
        if ids and not self._ended:
            started = time.thread_time()
            num_accepted = self.matcher.try_consume_tokens(ids)
            self._charge(started, len(ids))
        if num_accepted == len(ids) and not (ends and not self._may_end()):
            self._ended = self._ended or ends
            return True
        self._error = self.error() or f"id {token_ids[num_accepted]} is not allowed here"
        return False

    def _may_end(self) -> bool:
        return not self._ended and bool(self.matcher.is_accepting())

    def validate_tokens(self, token_ids: Sequence[int]) -> list[int]:
        """Longest acceptable prefix before any end of sequence; does not advance."""
        ids = list(token_ids)
        end = next((i for i, token_id in enumerate(ids) if token_id in self._eos_ids), len(ids))
        return ids[: self.matcher.validate_tokens(ids[:end])]

    def rollback(self, num_tokens: int) -> None:
        """Undo accepted ids, none of which may be an end of sequence."""
        if num_tokens and not self.matcher.rollback(num_tokens):
            raise RuntimeError(f"the grammar cannot go back {num_tokens} tokens: {self.error()}")

    def fill_bitmask(self, bitmask: Bitmask, row: int) -> None:
        """Write the mask of the next id; look at `error` afterwards."""
        target = bitmask[row]
        started = time.thread_time()
        self.matcher.unsafe_compute_mask_ptr(target.ctypes.data, target.nbytes)
        self._charge(started, 0)

    def _charge(self, started: float, num_tokens: int) -> None:
        """Count what a call took; too much in all is an error of the grammar."""
        self._seconds += time.thread_time() - started
        self._num_tokens += num_tokens
        if self._seconds > MAX_SECONDS + MAX_SECONDS_PER_TOKEN * self._num_tokens:
            self._is_too_slow = True
            self._error = self._error or (
                f"it takes too long: {self._seconds:.2f} s for {self._num_tokens} tokens; make the "
                "grammar less ambiguous"
            )

    def is_terminated(self) -> bool:
        """Whether only the end of the sequence may follow, or has come."""
        return self._ended or bool(self.matcher.is_stopped())

    def is_beyond_limits(self) -> bool:
        """Whether the constraint is too much, for `llguidance` or in time; an id that is not
        allowed is no such error."""
        return self._is_too_slow or bool(self.matcher.is_error())

    def error(self) -> str:
        """What is wrong with the state; empty while all is well."""
        if self._error:
            return self._error
        return matcher_error(self.matcher) if self.matcher.is_error() else ""


class _Vocabulary:
    """What `llguidance` asks of a tokenizer.

    Ids without bytes, and those beyond the tokenizer, have none here: no mask ever allows them.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self.tokens = [data or b"" for data in tokenizer.token_bytes()][:vocab_size]
        self.tokens += [b""] * (vocab_size - len(self.tokens))
        special_ids = set(tokenizer.all_special_ids) | eos_ids
        self.special_token_ids = sorted(i for i in special_ids if i < vocab_size)
        self._specials = frozenset(self.special_token_ids)
        self.special_tokens: dict[str, int] = {}
        for token_id in self.special_token_ids:
            text = str(tokenizer.convert_ids_to_tokens([token_id])[0])
            self.tokens[token_id] = text.encode()
            self.special_tokens[text] = token_id
        self.eos_token_id = min(eos_ids, default=tokenizer.eos_token_id)
        self.bos_token_id = None
        self._id_of: dict[bytes, int] | None = None

    def __call__(self, text: bytes | str) -> list[int]:
        """The tokenizer's own way to write a text, which is what masks force where they can.

        Some tokenizers change a text (a space in front, say): then the longest pieces that fit.
        """
        data = text.encode() if isinstance(text, str) else text
        ids = [
            int(i)
            for i in self._tokenizer.encode(
                data.decode("utf-8", "replace"), add_special_tokens=False
            )
        ]
        # Text that looks like a special token is text: its id would end or disturb the output.
        if self._specials.isdisjoint(ids) and b"".join(self.tokens[i] for i in ids) == data:
            return ids
        return self._longest_pieces(data)

    def _longest_pieces(self, data: bytes) -> list[int]:
        if self._id_of is None:
            special = self._specials
            self._id_of = {t: i for i, t in enumerate(self.tokens) if t and i not in special}
        ids: list[int] = []
        while data:
            length = min(len(data), MAX_PIECE_BYTES)
            while length and data[:length] not in self._id_of:
                length -= 1
            if not length:
                break
            ids.append(self._id_of[data[:length]])
            data = data[length:]
        return ids
