"""Small tokenizers of every decoder family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from tellin.loading.tokenizer import Tokenizer as ModelTokenizer

SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
SNIPPETS = [
    "the",
    " the",
    " sea",
    "汉",
    "é",
    "👩🏽\u200d🚀",
    "def f(x):",
    "\n\n",
    "STOP",
    "ST",
    "OP",
]


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def finish(backend: Tokenizer, adds_bos: bool = False) -> ModelTokenizer:
    """Add special tokens, and wrap."""
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    bos = backend.token_to_id("<s>")
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", bos)]
        )
    return ModelTokenizer(
        backend,
        bos_token_id=bos,
        eos_token_id=backend.token_to_id("</s>"),
        chat_templates={"default": TEMPLATE},
        source=Path("test-tokenizer"),
    )


def byte_level(adds_bos: bool = False) -> ModelTokenizer:
    """GPT-2 style: all 256 bytes, and some longer tokens that end inside characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    encode = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    merges: list[tuple[str, str]] = []
    for text in SNIPPETS:
        piece = encode.pre_tokenize_str(text)[0][0]
        for cut in range(2, len(piece) + 1):
            if piece[:cut] not in vocab:
                vocab[piece[:cut]] = len(vocab)
                merges.append((piece[: cut - 1], piece[cut - 1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = encode
    tokenizer.decoder = decoders.ByteLevel()
    return finish(tokenizer, adds_bos)


def _sentencepiece_vocab() -> tuple[dict[str, int], list[tuple[str, str]]]:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    pieces += sorted({c for text in SNIPPETS for c in text.replace(" ", "\u2581")} - {"\u2581"})
    pieces = [piece for piece in pieces if piece not in ("汉", "🚀")]  # these need bytes
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges: list[tuple[str, str]] = []
    for text in ("\u2581the", "the", "\u2581sea", "STOP", "ST", "OP"):
        for cut in range(2, len(text) + 1):
            if text[:cut] not in vocab:
                vocab[text[:cut]] = len(vocab)
                merges.append((text[: cut - 1], text[cut - 1]))
    return vocab, merges


def _sentencepiece(decoder: Any) -> ModelTokenizer:
    vocab, merges = _sentencepiece_vocab()
    model = models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoder
    return finish(tokenizer)


def gemma_like() -> ModelTokenizer:
    """SentencePiece BPE with byte fallback; the text keeps its first space."""
    replace = decoders.Replace("\u2581", " ")
    return _sentencepiece(decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse()]))


def llama2_like() -> ModelTokenizer:
    """The same, with the first space of a text taken off."""
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _sentencepiece(decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)]))


def metaspace() -> ModelTokenizer:
    """SentencePiece without byte fallback: no bytes are known, text comes from windows."""
    return _sentencepiece(decoders.Metaspace())


def wordpiece() -> ModelTokenizer:
    """BERT style: text comes from windows, with spaces between words."""
    words = ["[UNK]", "the", "sea", "shell", "##s", "##ing", "STOP", "!", "é", "汉"]
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return finish(tokenizer)


FACTORIES = {
    "byte_level": byte_level,
    "gemma_like": gemma_like,
    "llama2_like": llama2_like,
    "metaspace": metaspace,
    "wordpiece": wordpiece,
}
CACHE: dict[str, ModelTokenizer] = {}


def get(name: str) -> ModelTokenizer:
    """One shared instance per kind."""
    if name not in CACHE:
        CACHE[name] = byte_level(adds_bos=True) if name == "byte_level_bos" else FACTORIES[name]()
    return CACHE[name]
