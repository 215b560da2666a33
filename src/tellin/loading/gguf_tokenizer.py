"""Builds a `tokenizers.Tokenizer` from the vocabulary in a GGUF file.

Five kinds: byte-level BPE (``gpt2``), SentencePiece with scores (``llama``: Llama 2, Mistral,
Gemma) or with merges (``gemma4``), WordPiece (``bert``), unigrams (``t5``: XLM-RoBERTa).
Each becomes what the model's own ``tokenizer.json`` describes, so that ids are the original's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.loading.gguf_vocab import GGUFVocabulary, TokenType
from tellin.loading.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from tellin.loading.spm_merges import spm_merges

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPACE = "\u2581"
"""SentencePiece's visible space."""
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>\Z")
_RSTRIP_EXCEPTIONS = ("<unk>", "<s>", "<|endoftext|>")
"""Phi-3's special tokens swallow the white space that follows them, except these."""


def build_backend(vocabulary: GGUFVocabulary) -> Tokenizer:
    """The tokenizer of a GGUF file.

    Raises:
        UnsupportedModelError: the kind of tokenizer, or its pre-tokenizer, is not supported.
        ModelLoadError: the vocabulary is damaged.
    """
    builders: dict[str, Callable[[GGUFVocabulary], Tokenizer]] = {
        "gpt2": _byte_level,
        "llama": _sentencepiece,
        "gemma4": _sentencepiece_merges,
        "bert": _wordpiece,
        "t5": _unigram,
    }
    builder = builders.get(vocabulary.model)
    if builder is None:
        raise UnsupportedModelError(
            f"{vocabulary.path}: tokenizer {vocabulary.model!r:.60} is not supported "
            f"(tokenizer.ggml.model); supported are {', '.join(builders)}"
        )
    return builder(vocabulary)


def _byte_level(vocabulary: GGUFVocabulary) -> Tokenizer:
    from tokenizers import decoders

    pre = _pre_tokenizer(vocabulary)
    tokens = vocabulary.all_tokens()
    merges = _merges(vocabulary)
    backend = _bpe(vocabulary, _vocab(tokens), merges, ignore_merges=pre.ignore_merges)
    normalizer = pre.build_normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre.build()
    backend.decoder = decoders.ByteLevel()
    _add_special_tokens(vocabulary, backend, tokens)
    pair = ["bos", "$A", "eos", "$B:1", "eos"] if vocabulary.pre == "modern-bert" else None
    _set_template(vocabulary, backend, tokens, add_bos=pre.add_bos, pair=pair)
    return backend


def _merges(vocabulary: GGUFVocabulary) -> list[tuple[str, str]]:
    pairs: list[Any] = [tuple(merge.split(" ")) for merge in vocabulary.merges()]
    for index, pair in enumerate(pairs):
        if len(pair) != 2:
            raise ModelLoadError(
                f"{vocabulary.path}: tokenizer.ggml.merges: entry {index} is no pair of tokens: "
                f"{' '.join(pair)!r}"
            )
    return pairs


def _pre_tokenizer(vocabulary: GGUFVocabulary) -> PreTokenizer:
    pre = PRE_TOKENIZERS.get(vocabulary.pre)
    if pre is not None:
        return pre
    if vocabulary.pre in ("", "default"):
        raise UnsupportedModelError(
            f"{vocabulary.path}: does not name its pre-tokenizer (tokenizer.ggml.pre), so token "
            "ids cannot be right; it was written by an old converter: get a newer file"
        )
    raise UnsupportedModelError(
        f"{vocabulary.path}: pre-tokenizer {vocabulary.pre!r:.60} is not supported "
        "(tokenizer.ggml.pre); "
        f"supported are {', '.join(PRE_TOKENIZERS)}"
    )


def _sentencepiece(vocabulary: GGUFVocabulary) -> Tokenizer:
    from tokenizers import decoders, normalizers

    scores = vocabulary.scores
    if scores is None:
        raise ModelLoadError(f"{vocabulary.path}: tokenizer.ggml.scores is missing")
    tokens = vocabulary.all_tokens()
    add_prefix = vocabulary.metadata.get_bool("tokenizer.ggml.add_space_prefix", True)
    if not add_prefix:
        # Converters write the spaces of these tokens as spaces; they are matched in normalised
        # text. With a prefix, normalisation would put it before each of them: matched in raw text.
        for token_id in vocabulary.ids_of_type(TokenType.USER_DEFINED):
            tokens[token_id] = tokens[token_id].replace(" ", SPACE)
    vocab = _vocab(tokens)
    mergeable = _mergeable_ids(vocabulary, tokens)
    if len(vocab) < len(tokens) or "" in vocab:
        mergeable = [i for i in mergeable if tokens[i] and vocab[tokens[i]] == i]
    merges = spm_merges([tokens[i] for i in mergeable], scores[mergeable])
    unknown = vocabulary.special_id("unknown")
    backend = _bpe(
        vocabulary,
        vocab,
        merges,
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=all(f"<0x{byte:02X}>" in vocab for byte in range(256)),
    )
    spaces = normalizers.Replace(" ", SPACE)
    prefix = [normalizers.Prepend(SPACE)] if add_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, spaces]) if prefix else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    _add_special_tokens(vocabulary, backend, tokens, match_normalized=not add_prefix)
    _set_template(vocabulary, backend, tokens, add_bos=True)
    return backend


def _sentencepiece_merges(vocabulary: GGUFVocabulary) -> Tokenizer:
    """Pieces of a text whose spaces are visible, joined by merges; bytes where there are none."""
    from tokenizers import decoders, normalizers

    tokens = vocabulary.all_tokens()
    vocab = _vocab(tokens)
    unknown = vocabulary.special_id("unknown")
    backend = _bpe(
        vocabulary,
        vocab,
        _merges(vocabulary),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=all(f"<0x{byte:02X}>" in vocab for byte in range(256)),
    )
    backend.normalizer = normalizers.Replace(" ", SPACE)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    _add_special_tokens(vocabulary, backend, tokens)
    _set_template(vocabulary, backend, tokens, add_bos=True)
    return backend


def _mergeable_ids(vocabulary: GGUFVocabulary, tokens: list[str]) -> list[int]:
    """Ids of the tokens that text can become by merging."""
    if vocabulary.types is not None:
        return np.flatnonzero(vocabulary.types == TokenType.NORMAL).tolist()
    return [i for i, token in enumerate(tokens) if not _BYTE_TOKEN.match(token)]


def _wordpiece(vocabulary: GGUFVocabulary) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokens = [_wordpiece_token(token) for token in vocabulary.all_tokens()]
    vocab = _vocab(tokens)
    unknown = vocabulary.special_id("unknown")
    unk_token = "[UNK]" if unknown is None else tokens[unknown]
    if unk_token not in vocab:
        raise ModelLoadError(
            f"{vocabulary.path}: the vocabulary has no unknown token {unk_token!r}"
        )
    is_cased = any(token != token.lower() for token in tokens if not _is_bracketed(token))
    backend = Tokenizer(models.WordPiece(vocab, unk_token=unk_token))
    backend.normalizer = normalizers.BertNormalizer(lowercase=not is_cased)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    _add_special_tokens(vocabulary, backend, tokens)
    # Of a pair the second text and its separator have type 1.
    pair = ["bos", "$A", "eos", "$B:1", "eos:1"]
    _set_template(vocabulary, backend, tokens, add_bos=True, add_eos=True, pair=pair)
    return backend


def _unigram(vocabulary: GGUFVocabulary) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    scores, unknown = vocabulary.scores, vocabulary.special_id("unknown")
    if unknown is None:
        unknown = next(iter(vocabulary.ids_of_type(TokenType.UNKNOWN)), None)
    if scores is None or unknown is None:
        what = "tokenizer.ggml.scores" if scores is None else "the unknown token's id"
        raise ModelLoadError(f"{vocabulary.path}: {what} is missing")
    metadata, tokens = vocabulary.metadata, vocabulary.all_tokens()
    try:
        vocab = list(zip(tokens, scores.tolist(), strict=False))
        backend = Tokenizer(models.Unigram(vocab, unknown, byte_fallback=False))
        if metadata.has("tokenizer.ggml.precompiled_charsmap"):
            charsmap = metadata.get_numbers("tokenizer.ggml.precompiled_charsmap")
            backend.normalizer = normalizers.Precompiled(charsmap.astype(np.uint8).tobytes())
    except Exception as error:
        # The library raises plain Exception.
        raise ModelLoadError(f"{vocabulary.path}: the tokenizer is damaged: {error}") from None
    add_prefix = metadata.get_bool("tokenizer.ggml.add_space_prefix", True)
    scheme = "always" if add_prefix else "never"
    metaspace = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme)
    if metadata.get_bool("tokenizer.ggml.remove_extra_whitespaces", True):
        steps = [pre_tokenizers.WhitespaceSplit(), metaspace]
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    else:
        backend.pre_tokenizer = metaspace
    backend.decoder = decoders.Metaspace(SPACE, prepend_scheme=scheme)
    _add_special_tokens(vocabulary, backend, tokens)
    pair = ["bos", "$A", "eos", "eos", "$B", "eos"]
    _set_template(vocabulary, backend, tokens, add_bos=True, add_eos=True, pair=pair)
    return backend


def _wordpiece_token(token: str) -> str:
    """BERT's own writing of a token: GGUF marks beginnings of words, BERT their continuations."""
    if _is_bracketed(token):
        return token
    return token[1:] if token.startswith(SPACE) else f"##{token}"


def _is_bracketed(token: str) -> bool:
    return token.startswith("[") and token.endswith("]")


def _vocab(tokens: list[str]) -> dict[str, int]:
    """Token to id; of equal tokens the first counts."""
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(vocab) != len(tokens):
        vocab = {token: i for i, token in reversed(list(enumerate(tokens)))}
    return vocab


def _bpe(
    vocabulary: GGUFVocabulary,
    vocab: dict[str, int],
    merges: list[tuple[str, str]],
    **options: Any,
) -> Tokenizer:
    from tokenizers import Tokenizer, models

    try:
        return Tokenizer(models.BPE(vocab, merges, **options))
    except Exception as error:
        # The library raises plain Exception when a merge's parts or result are no tokens.
        raise ModelLoadError(
            f"{vocabulary.path}: the tokenizer's merges are damaged: {error}"
        ) from None


def _add_special_tokens(
    vocabulary: GGUFVocabulary,
    backend: Tokenizer,
    tokens: list[str],
    match_normalized: bool = False,
) -> None:
    """Declare control tokens (special) and user-defined ones (matched as a whole, not special)."""
    from tokenizers import AddedToken

    swallows_space = (
        vocabulary.model == "llama"
        and vocabulary.metadata.get_str("general.architecture", "") == "phi3"
    )
    special = set(vocabulary.ids_of_type(TokenType.CONTROL, TokenType.UNKNOWN))
    for name in ("bos", "eos", "eot", "unknown", "padding", "mask", "seperator", "cls"):
        token_id = vocabulary.special_id(name)
        if token_id is not None:
            special.add(token_id)
    added = []
    for token_id in sorted({*special, *vocabulary.ids_of_type(TokenType.USER_DEFINED)}):
        text = tokens[token_id]
        if not text:
            continue
        added.append(
            AddedToken(
                text,
                special=token_id in special,
                normalized=match_normalized and token_id not in special,
                rstrip=swallows_space and text not in _RSTRIP_EXCEPTIONS,
            )
        )
    backend.add_tokens(added)


def _set_template(
    vocabulary: GGUFVocabulary,
    backend: Tokenizer,
    tokens: list[str],
    *,
    add_bos: bool,
    add_eos: bool = False,
    pair: list[str] | None = None,
) -> None:
    """Have BOS and EOS added around a text, where the file says so or, failing that, the kind.

    ``pair``: how two texts are put together if both are added.
    """
    from tokenizers.processors import TemplateProcessing

    metadata = vocabulary.metadata
    bos = vocabulary.special_id("bos" if vocabulary.model != "bert" else "cls")
    eos = vocabulary.special_id("eos" if vocabulary.model != "bert" else "seperator")
    if vocabulary.model == "bert":
        bos = vocabulary.special_id("bos") if bos is None else bos
        eos = vocabulary.special_id("eos") if eos is None else eos
    add_bos = metadata.get_bool("tokenizer.ggml.add_bos_token", add_bos) and bos is not None
    add_eos = metadata.get_bool("tokenizer.ggml.add_eos_token", add_eos) and eos is not None
    if not (add_bos or add_eos):
        return
    specials = [
        {"id": name, "ids": [token_id], "tokens": [tokens[token_id]]}
        for name, token_id in (("bos", bos), ("eos", eos))
        if token_id is not None
    ]
    head, tail = ["bos"] if add_bos else [], ["eos"] if add_eos else []
    backend.post_processor = TemplateProcessing(
        single=[*head, "$A", *tail],
        pair=pair if pair and head and tail else [*head, "$A", *tail, *head, "$B:1", *tail],
        special_tokens=specials,
    )
