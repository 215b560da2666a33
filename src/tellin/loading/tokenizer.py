"""`Tokenizer`: text to token ids and back, for every model, on the `tokenizers` library.

Adds to the library what an engine needs: the bytes of each token, BOS exactly once, control tokens
on request only, chat templates. Encoding and decoding may be called from several threads.
"""

from __future__ import annotations

import functools
import numbers
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from tellin.exceptions import (
    InvalidParameterError,
    LoadError,
    ModelLoadError,
    UnsupportedFeatureError,
)
from tellin.loading.gguf_tokenizer import SPACE, build_backend
from tellin.loading.gguf_vocab import GGUFVocabulary
from tellin.loading.templates import templates_from_folder, templates_from_gguf
from tellin.loading.token_bytes import TOKEN_BYTES, decoder_kind
from tellin.loading.tokenizer_files import backend_of_folder, token_text, tokenizer_config_of
from tellin.loading.typed_mapping import TypedMapping

if TYPE_CHECKING:
    import tokenizers

    from tellin.loading.encoding import Encoding

_MAX_TOKEN_ID = (1 << 32) - 1


class Tokenizer:
    """A model's tokenizer.

    Args:
        backend: the library's tokenizer; this object owns it and turns truncation and padding off.
        bos_token_id: beginning of a text, None if the model has none.
        eos_token_id: end of a text or turn, None if the model has none.
        pad_token_id: what fills texts up to a common length, None if the model has none.
        chat_templates: the model's chat templates by name.
        source: file or folder it came from, for messages.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None,
        eos_token_id: int | None,
        chat_templates: Mapping[str, str],
        source: Path,
        pad_token_id: int | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.pad_token_id = pad_token_id
        self.chat_templates = dict(chat_templates)
        self.source = source
        self._added = backend.get_added_tokens_decoder()
        self.all_special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        """Number of tokens, including added ones."""
        self._kind = decoder_kind(backend)
        self._plain_lock = threading.Lock()
        self._plain_backend: tokenizers.Tokenizer | None = None

    def __len__(self) -> int:
        return self.vocab_size

    @functools.cached_property
    def max_token_id(self) -> int:
        """The largest id; ``vocab_size - 1`` unless the vocabulary has holes."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @functools.cached_property
    def _ends(self) -> tuple[int, int]:
        """How many special tokens the model wants before and behind a text."""
        plain = self.backend.encode("a", add_special_tokens=False).ids
        ids = self.backend.encode("a", add_special_tokens=True).ids
        num_added = len(ids) - len(plain)
        before = next((n for n in range(num_added + 1) if ids[n : n + len(plain)] == plain), 0)
        return before, num_added - before

    @property
    def bos_token(self) -> str | None:
        """The text of ``bos_token_id``."""
        return self._token(self.bos_token_id)

    @property
    def eos_token(self) -> str | None:
        """The text of ``eos_token_id``."""
        return self._token(self.eos_token_id)

    @property
    def pad_token(self) -> str | None:
        """The text of ``pad_token_id``."""
        return self._token(self.pad_token_id)

    def get_vocab(self) -> dict[str, int]:
        """Id of every token in the vocabulary's writing, added ones included."""
        return dict(self.backend.get_vocab(with_added_tokens=True))

    @property
    def chat_template(self) -> str | None:
        """Jinja text of the usual chat template."""
        return self.chat_templates.get("default")

    def __call__(
        self,
        text: str | Sequence[str],
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool | str | None = None,
        max_length: int | None = None,
        return_tensors: str | None = None,
    ) -> Encoding:
        """``input_ids`` and ``attention_mask`` of one text or of several.

        For the other arguments and errors see `tellin.loading.encoding.encode_texts`.
        """
        from tellin.loading.encoding import encode_texts

        return encode_texts(
            lambda one: self.encode(one, add_special_tokens),
            text,
            pad_token_id=self.pad_token_id,
            ends=self._ends if add_special_tokens else (0, 0),
            padding=padding,
            truncation=truncation,
            max_length=max_length,
            return_tensors=return_tensors,
        )

    def encode(
        self, text: str, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Token ids of a text.

        Args:
            text: any text; "" gives no tokens, or BOS alone.
            add_special_tokens: add BOS and EOS where the model wants them. A text that already
                begins with BOS gets no second one.
            parse_special: whether control tokens written out in the text (``<|im_end|>``) become
                these tokens. False takes them as ordinary text: use it for text of strangers.

        Raises:
            InvalidParameterError: the text is not a string, holds lone surrogates, or something
                that the vocabulary has no token for.
        """
        backend = self.backend if parse_special else self._plain()
        try:
            ids: list[int] = backend.encode(text, add_special_tokens=add_special_tokens).ids
        except BaseException as error:
            if not _is_failure(error):
                raise
            raise InvalidParameterError(
                f"the text cannot be tokenised: {_why_no_text(text) or error}",
                parameter="text",
                value=type(text),
            ) from None
        if add_special_tokens and len(ids) > 1 and ids[0] == ids[1] == self.bos_token_id:
            del ids[0]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD, unknown ids nothing.

        Raises:
            InvalidParameterError: an id is negative or no 32-bit integer.
        """
        try:
            return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except (TypeError, OverflowError) as error:
            raise InvalidParameterError(
                f"token ids must be integers from 0 to {_MAX_TOKEN_ID}: {error}", parameter="ids"
            ) from None

    def batch_decode(
        self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = True
    ) -> list[str]:
        """`decode` of each sequence."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    @overload
    def convert_ids_to_tokens(self, ids: int) -> str: ...
    @overload
    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]: ...
    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str]:
        """The vocabulary's own writing of a token, or of several; "" for unknown ids."""
        if isinstance(ids, int | numbers.Integral):
            return self._token(int(ids)) or ""
        return [self._token(token_id) or "" for token_id in ids]

    # A string is a sequence of strings too: checkers are told which of the two comes first.
    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...  # type: ignore[overload-overlap]
    @overload
    def convert_tokens_to_ids(self, tokens: Sequence[str]) -> list[int | None]: ...
    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        """Id of a token in the vocabulary's writing, or of several; None for unknown tokens."""
        if isinstance(tokens, str):
            return self.backend.token_to_id(tokens)
        return [self.backend.token_to_id(token) for token in tokens]

    def id_to_bytes(self, token_id: int) -> bytes | None:
        """The bytes that a token adds to a text; None if the id is unknown.

        Exact for byte-level and byte-fallback vocabularies; WordPiece knows only the letters.
        """
        token = self._token(token_id)
        if token is None:
            return None
        added = self._added.get(token_id)
        if added is not None:
            return self._text_of_added(added.content)
        return TOKEN_BYTES[self._kind](token)

    def token_bytes(self) -> list[bytes | None]:
        """`id_to_bytes` of every id from 0 to `max_token_id`, in one pass."""
        table: list[bytes | None] = [None] * (self.max_token_id + 1)
        to_bytes = TOKEN_BYTES[self._kind]
        for token, token_id in self.backend.get_vocab(with_added_tokens=True).items():
            table[token_id] = to_bytes(token)
        for token_id, added in self._added.items():
            table[token_id] = self._text_of_added(added.content)
        return table

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        tokenize: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt of a conversation; encode it with ``add_special_tokens=False``.

        Args:
            messages: OpenAI messages: ``role``, ``content`` (a string, parts or None), ...
            add_generation_prompt: end with the beginning of the assistant's answer.
            continue_final_message: leave the last message open instead; excludes the former.
            tools: OpenAI tool definitions.
            chat_template: the name of one of the model's templates, or Jinja text; None = the
                model's own (its ``tool_use`` template if there are tools and it has one).
            tokenize: False; there so that calls written for the transformers library say it.
            kwargs: further variables of the template.

        Raises:
            InvalidParameterError: no template, a wrong combination of arguments, a broken one, or
                ``tokenize=True``.
            UnsupportedFeatureError: there are tools, which the template would leave out.
            RequestError: the template refuses the conversation; the message carries its words.
        """
        if tokenize:
            raise InvalidParameterError(
                "apply_chat_template makes text; for ids encode it with add_special_tokens=False",
                parameter="tokenize",
                value=tokenize,
            )
        # Jinja is imported when it is needed first.
        from tellin.loading.chat_template import choose_template, compile_template

        text = choose_template(self.source, self.chat_templates, chat_template, tools is not None)
        if tools and "tools" not in text:
            raise UnsupportedFeatureError(
                "the chat template shows the model no tools: give a chat_template that does, or "
                "describe the tools in a system message"
            )
        special = {"bos_token": self.bos_token or "", "eos_token": self.eos_token or ""}
        template = compile_template(text, None if text == chat_template else self.source)
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            variables={**special, **kwargs},
        )

    def _token(self, token_id: int | None) -> str | None:
        if token_id is None or not 0 <= token_id <= _MAX_TOKEN_ID:
            return None
        return self.backend.id_to_token(token_id)

    def _text_of_added(self, content: str) -> bytes:
        if self._kind == "byte_fallback":
            content = content.replace(SPACE, " ")
        return content.encode()

    def _plain(self) -> tokenizers.Tokenizer:
        """A copy that takes special tokens in a text literally; made on first use."""
        with self._plain_lock:
            if self._plain_backend is None:
                plain = type(self.backend).from_str(self.backend.to_str())
                plain.encode_special_tokens = True
                self._plain_backend = plain
            return self._plain_backend


def load_tokenizer(path: Path | str) -> Tokenizer:
    """Build the tokenizer of a model file or folder.

    Raises:
        ModelNotFoundError: there is no model at ``path``.
        ModelLoadError: the model has no tokenizer, or it is damaged.
        UnsupportedModelError: the kind of tokenizer is not supported.
    """
    from tellin.loading.gguf import GGUFFile
    from tellin.loading.model_source import locate_model

    path = locate_model(Path(path))
    if path.is_dir():
        return tokenizer_from_folder(path)
    file = GGUFFile(path, read_tensors=False)
    try:
        return tokenizer_from_gguf(file.metadata)
    finally:
        file.close()


def tokenizer_from_gguf(metadata: TypedMapping) -> Tokenizer:
    """Build the tokenizer of a GGUF file. Raises: as `load_tokenizer`."""
    if not metadata.has("tokenizer.ggml.model"):
        raise ModelLoadError(f"{metadata.path}: has no tokenizer (tokenizer.ggml.model is missing)")
    vocabulary = GGUFVocabulary(metadata)
    return Tokenizer(
        build_backend(vocabulary),
        bos_token_id=vocabulary.special_id("bos"),
        eos_token_id=vocabulary.special_id("eos"),
        pad_token_id=vocabulary.special_id("padding"),
        chat_templates=templates_from_gguf(metadata),
        source=metadata.path,
    )


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """Build the tokenizer of a Hugging Face folder from its ``tokenizer.json``, or from the older
    ``vocab.json`` and ``merges.txt``.

    Raises: as `load_tokenizer`.
    """
    config = tokenizer_config_of(folder)
    try:
        backend = backend_of_folder(folder, config)
        ids = backend.encode("a").ids  # some faults show only here
        dropout = getattr(backend.model, "dropout", None)
    except BaseException as error:
        if not _is_failure(error) or isinstance(error, LoadError):
            raise
        raise ModelLoadError(
            f"{folder / 'tokenizer.json'}: is not a usable tokenizer file: {error}"
        ) from None
    if dropout:
        raise ModelLoadError(
            f"{folder / 'tokenizer.json'}: 'dropout' is {dropout:g}: token ids would be random"
        )
    _declare_added_tokens(backend, config)

    def token_id(key: str) -> int | None:
        text = token_text(config, key)
        return None if text is None else backend.token_to_id(text)

    bos, eos = token_id("bos_token"), token_id("eos_token")
    _obey_bos_rules(backend, config, ids, bos, eos)
    return Tokenizer(
        backend,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=token_id("pad_token"),
        chat_templates=templates_from_folder(folder),
        source=folder,
    )


def _declare_added_tokens(backend: tokenizers.Tokenizer, config: TypedMapping) -> None:
    """Special tokens that only the configuration knows."""
    from tokenizers import AddedToken

    if not config.has("added_tokens_decoder"):
        return
    known = backend.get_added_tokens_decoder()
    entries = config.get_mapping("added_tokens_decoder")
    for key in entries:
        if not key.isdecimal() or len(key) > 20:
            raise ModelLoadError(
                f"{entries.path}: key 'added_tokens_decoder' holds {key!r:.40}, no token id"
            )
    for key in sorted(entries, key=int):
        entry = entries.get_mapping(key)
        text = entry.get_str("content")
        if int(key) in known or backend.token_to_id(text) not in (None, int(key)):
            continue
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        options = {flag: entry.get_bool(flag, False) for flag in flags}
        backend.add_tokens([AddedToken(text, **options)])


def _obey_bos_rules(
    backend: tokenizers.Tokenizer,
    config: TypedMapping,
    ids: Sequence[int],
    bos: int | None,
    eos: int | None,
) -> None:
    """Let ``add_bos_token`` and ``add_eos_token`` overrule the post-processor, which makes ``ids``
    of a text."""
    from tokenizers.processors import TemplateProcessing

    if not config.get_str("tokenizer_class", "").startswith(("Llama", "Gemma", "CodeLlama")):
        return
    has_bos, has_eos = [*ids[:1]] == [bos], [*ids[-1:]] == [eos]
    add_bos = config.get_bool("add_bos_token", has_bos) and bos is not None
    add_eos = config.get_bool("add_eos_token", has_eos) and eos is not None
    if (add_bos, add_eos) == (has_bos, has_eos):
        return
    head, tail = ["bos"] if add_bos else [], ["eos"] if add_eos else []
    backend.post_processor = TemplateProcessing(
        single=[*head, "$A", *tail],
        pair=[*head, "$A", *tail, *head, "$B:1", *tail],
        special_tokens=[
            {"id": name, "ids": [token_id], "tokens": [backend.id_to_token(token_id)]}
            for name, token_id in (("bos", bos), ("eos", eos))
            if token_id is not None
        ],
    )


def _is_failure(error: BaseException) -> bool:
    """Whether the library failed at a text or a file: it raises plain `Exception`, or panics, which
    is no `Exception` at all."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _why_no_text(text: object) -> str:
    if not isinstance(text, str):
        return f"it is of type {type(text).__name__}, not a string"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return (
            f"character {error.start} is the lone surrogate {text[error.start]!a}, which is what "
            "Python makes of bytes that are not UTF-8"
        )
    return ""
