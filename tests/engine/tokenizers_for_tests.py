"""Small tokenizers of every decoder family, and the wrapper that the shell expects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

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


class TestTokenizer:
    """A tokenizer as the shell uses it, around a ``tokenizers.Tokenizer``."""

    __test__ = False

    def __init__(self, backend: Tokenizer, adds_bos: bool = False) -> None:
        self.backend = backend
        self.all_special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        self.bos_token_id: int | None = backend.token_to_id("<s>")
        self.eos_token_id: int | None = backend.token_to_id("</s>")
        self.adds_bos = adds_bos
        self.templates: list[str | None] = []

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        if add_special_tokens and self.adds_bos and ids[:1] != [self.bos_token_id]:
            assert self.bos_token_id is not None
            return [self.bos_token_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        return [self.backend.id_to_token(token_id) for token_id in ids]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        self.templates.append(chat_template)
        text = "<s>" + "".join(
            f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>" for m in messages
        )
        if continue_final_message:
            return text.removesuffix("<|im_end|>")
        return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")


def _add_specials(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    return tokenizer


def byte_level() -> TestTokenizer:
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
    return TestTokenizer(_add_specials(tokenizer))


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


def _sentencepiece(decoder: Any) -> TestTokenizer:
    vocab, merges = _sentencepiece_vocab()
    model = models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoder
    return TestTokenizer(_add_specials(tokenizer))


def gemma_like() -> TestTokenizer:
    """SentencePiece BPE with byte fallback; the text keeps its first space."""
    replace = decoders.Replace("\u2581", " ")
    return _sentencepiece(decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse()]))


def llama2_like() -> TestTokenizer:
    """The same, with the first space of a text taken off."""
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _sentencepiece(decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)]))


def metaspace() -> TestTokenizer:
    """SentencePiece without byte fallback: no bytes are known, text comes from windows."""
    return _sentencepiece(decoders.Metaspace())


def wordpiece() -> TestTokenizer:
    """BERT style: text comes from windows, with spaces between words."""
    words = ["[UNK]", "the", "sea", "shell", "##s", "##ing", "STOP", "!", "é", "汉"]
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return TestTokenizer(_add_specials(tokenizer))


FACTORIES = {
    "byte_level": byte_level,
    "gemma_like": gemma_like,
    "llama2_like": llama2_like,
    "metaspace": metaspace,
    "wordpiece": wordpiece,
}
CACHE: dict[str, TestTokenizer] = {}


def get(name: str) -> TestTokenizer:
    """One shared instance per kind."""
    if name not in CACHE:
        CACHE[name] = FACTORIES[name]()
    return CACHE[name]
