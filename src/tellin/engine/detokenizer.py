"""Text of a growing list of token ids, and the end of it by stop strings.

Owns a request's output ids and text. A character is released when all its bytes have arrived and it
can no longer be part of a stop string; so the pieces handed out, joined, are the final text, and no
piece shows half a character or the beginning of a stop string. Knows nothing of requests.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from tellin.engine.stop_strings import StopMatcher, ThoughtGate
from tellin.engine.token_table import MAX_TOKEN_ID, TokenTable
from tellin.sampling_params import SamplingParams

NUM_CONTEXT_TOKENS = 5
"""Prompt tokens given to a decoder as context: more than one character spans."""


class TokenStream(Protocol):
    """Turns tokens into text, one at a time."""

    def push(self, token_id: int) -> str:
        """Text that has become certain with this token."""
        ...

    def flush(self) -> str:
        """What is left at the end: an incomplete character becomes U+FFFD."""
        ...


class ByteStream:
    """Tokens whose bytes are known: exact, constant time per token."""

    def __init__(
        self, table: TokenTable, prompt_token_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._table = table
        self._skipped: frozenset[int] = table.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._has_pending = False
        self._num_to_strip = 0
        if table.num_stripped and all(i in table.special_ids for i in prompt_token_ids):
            self._num_to_strip = table.num_stripped
        if prompt_token_ids:
            table.bytes_of(prompt_token_ids[-1])
            if prompt_token_ids[-1] not in table.complete_text:
                for token_id in prompt_token_ids[-NUM_CONTEXT_TOKENS:]:
                    self.push(token_id)

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        text = self._table.complete_text.get(token_id)
        if text is None or self._has_pending:
            raw = self._table.bytes_of(token_id)
            text = self._decoder.decode(raw)
            self._has_pending = bool(self._decoder.getstate()[0])
        return self._strip(text) if self._num_to_strip else text

    def flush(self) -> str:
        text = self._decoder.decode(b"", True)
        self._has_pending = False
        return self._strip(text) if self._num_to_strip else text

    def _strip(self, text: str) -> str:
        while text and self._num_to_strip:
            if text[0] == " ":
                text = text[1:]
                self._num_to_strip -= 1
            else:
                self._num_to_strip = 0
        return text


class WindowStream:
    """Any tokenizer: compares the text of a window of tokens with and without the new one."""

    def __init__(
        self, table: TokenTable, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        self._tokenizer = table.tokenizer
        self._special_ids = table.special_ids
        self._skip_special = params.skip_special_tokens
        self._spaces_between_special = params.spaces_between_special_tokens
        self._ids = list(prompt_token_ids[-NUM_CONTEXT_TOKENS:])
        self._prefix = 0  # start of the window
        self._read = len(self._ids)  # tokens before this have been turned into text

    def push(self, token_id: int) -> str:
        is_special = token_id in self._special_ids
        if (is_special and self._skip_special) or not 0 <= token_id <= MAX_TOKEN_ID:
            return ""
        follows_special = bool(self._ids) and self._ids[-1] in self._special_ids
        self._ids.append(token_id)
        if is_special and follows_special and not self._spaces_between_special:
            self._prefix = self._read = len(self._ids)
            return self._tokenizer.decode([token_id], skip_special_tokens=False)
        return self._advance(final=False)

    def flush(self) -> str:
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        before = self._tokenizer.decode(
            self._ids[self._prefix : self._read], skip_special_tokens=self._skip_special
        )
        after = self._tokenizer.decode(
            self._ids[self._prefix :], skip_special_tokens=self._skip_special
        )
        if len(after) <= len(before) or (after.endswith("\ufffd") and not final):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return after[len(before) :]


class Detokenizer:
    """Ids without text: for requests or engines without detokenisation."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids)

    def update(
        self, new_token_ids: list[int], drop_last_text: bool = False, finished: bool = False
    ) -> str | None:
        """Take the tokens of one step.

        Args:
            drop_last_text: the last token ended the request and is not to be shown.
            finished: no more tokens will come.

        Returns:
            The stop string that ended the output, if one did. Then tokens after the one that
            completed it have been dropped.
        """
        self.token_ids.extend(new_token_ids)
        return None

    def finish(self) -> None:
        """No more tokens will come (the request was aborted): release what was held back."""

    def next_text(self, delta: bool) -> str:
        """Released text: all of it, or with ``delta`` what is new since the last call."""
        return ""

    @staticmethod
    def from_request(
        table: TokenTable | None, params: SamplingParams, prompt_token_ids: Sequence[int]
    ) -> Detokenizer:
        """The detokenizer that a request needs. ``table`` is None without a tokenizer."""
        if table is None or not params.detokenize:
            return Detokenizer()
        stream: TokenStream
        if table.knows_bytes:
            stream = ByteStream(table, prompt_token_ids, params.skip_special_tokens)
        else:
            stream = WindowStream(table, prompt_token_ids, params)
        return TextDetokenizer(
            stream,
            stop=params.stop or (),
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            gate=ThoughtGate(*params.stop_outside) if params.stop_outside and params.stop else None,
        )


class TextDetokenizer(Detokenizer):
    """Ids and text."""

    def __init__(
        self,
        stream: TokenStream,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        gate: ThoughtGate | None = None,
    ) -> None:
        super().__init__()
        self._stream = stream
        self._push = stream.push
        self._is_plain = not stop and gate is None
        self._matcher = StopMatcher(list(stop)) if stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._gate = gate
        self._released: list[str] = []  # pieces; in delta mode those not handed out yet
        self._held = ""  # characters that may begin a stop string

    def update(
        self, new_token_ids: list[int], drop_last_text: bool = False, finished: bool = False
    ) -> str | None:
        shown = new_token_ids[:-1] if drop_last_text else new_token_ids
        for token_id in shown:
            self.token_ids.append(token_id)
            text = self._push(token_id)
            if not text:
                continue
            if self._is_plain:
                self._released.append(text)
            else:
                stop = self._take(text)
                if stop is not None:
                    return stop
        if drop_last_text:
            self.token_ids.append(new_token_ids[-1])
        if finished:
            self.finish()
        return None

    def finish(self) -> None:
        pending = self._gate.finish() if self._gate is not None else self._held
        self._released.append(pending + self._stream.flush())
        self._held = ""

    def next_text(self, delta: bool) -> str:
        text = self._released[0] if len(self._released) == 1 else "".join(self._released)
        self._released = [] if delta else [text]
        return text

    def _take(self, text: str) -> str | None:
        """Search ``text``, release what is safe. Returns the stop string found."""
        if self._gate is not None:
            shown, text = self._gate.split(text)
            self._released.append(shown)
            if not self._gate.is_open:
                return None
            self._gate = None
        matcher = self._matcher
        if matcher is None or matcher.may_skip(text):
            self._released.append(text)
            return None
        may_stop = len(self.token_ids) > self._min_tokens
        buffer = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            stop = matcher.feed(char)
            if stop is not None and may_stop:
                self._released.append(buffer[: end if self._include_stop else end - len(stop)])
                self._held = ""
                return stop
        num_held = 0 if self._include_stop else matcher.num_partial
        split = len(buffer) - num_held
        self._released.append(buffer[:split])
        self._held = buffer[split:]
        return None
