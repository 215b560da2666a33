"""Pre-tokenizers of byte-level BPE families, by the name that GGUF files carry.

A GGUF file names its pre-tokenizer (``tokenizer.ggml.pre``) and leaves its definition to the
reader. The patterns are the ones in the families' own ``tokenizer.json``: they are part of the
models, and token ids are only right with exactly these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import normalizers, pre_tokenizers

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_WITH_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"

_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_QWEN35 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}" + _REST_WITH_SLASH
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}" + _REST_WITH_SLASH
)

_SEED = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Cased letters as DeepSeek lists them, which is not quite any Unicode property.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_PUNCTUATION = r"\s?[!-/:-~" + "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """How a family cuts text before merging."""

    patterns: tuple[str, ...] = ()
    """Regular expressions applied one after the other; each match becomes a piece."""
    single_digits: bool = False
    """Cut between digits, after the patterns."""
    gpt2_words: bool = False
    """Cut last by GPT-2's pattern, which the byte-level step has built in."""
    nfc: bool = False
    """Normalise to Unicode NFC first."""
    ignore_merges: bool = False
    """A whole piece that is a token is taken as it is."""
    falcon: bool = False
    """Cut at punctuation first, and threes of digits out of bytes at last."""
    add_bos: bool = False
    """Default where the file does not say."""

    def build_normalizer(self) -> normalizers.Normalizer | None:
        from tokenizers import normalizers

        return normalizers.NFC() if self.nfc else None

    def build(self) -> pre_tokenizers.PreTokenizer:
        from tokenizers import Regex, pre_tokenizers

        if self.falcon:
            return _build_falcon()
        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns
        ]
        if self.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2_words))
        return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)


def _build_falcon() -> pre_tokenizers.PreTokenizer:
    """Digits are cut after bytes have become letters, of which some count as digits: as trained."""
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation("contiguous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9]{3}"), "isolated"),
        ]
    )


_GPT2 = PreTokenizer(gpt2_words=True)
_GPT2_NFC = PreTokenizer(gpt2_words=True, nfc=True)
_DIGITS_GPT2 = PreTokenizer(single_digits=True, gpt2_words=True)
_LLAMA_BPE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_DEEPSEEK = PreTokenizer(
    (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_V3)
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt2": _GPT2,
    "gpt-2": _GPT2,
    "exaone4": _GPT2,
    "phi-2": _GPT2,
    "jais": _GPT2,
    "modern-bert": _GPT2_NFC,
    "mpt": _GPT2_NFC,
    "olmo": _GPT2_NFC,
    "smollm": _DIGITS_GPT2,
    "starcoder": _DIGITS_GPT2,
    "refact": _DIGITS_GPT2,
    "codeshell": _DIGITS_GPT2,
    "command-r": PreTokenizer(single_digits=True, gpt2_words=True, nfc=True),
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "llama-bpe": _LLAMA_BPE,
    "falcon-h1": _LLAMA_BPE,
    "lfm2": _LLAMA_BPE,
    "dbrx": PreTokenizer((_LLAMA3,)),
    "chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "glm4": PreTokenizer((_LLAMA3,), ignore_merges=True),
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "falcon": PreTokenizer(falcon=True),
    "qwen2": PreTokenizer((_QWEN2,), nfc=True),
    "hunyuan": PreTokenizer((_QWEN2,), nfc=True),
    "stablelm2": PreTokenizer((_QWEN2,), nfc=True),
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    "deepseek-r1-qwen": PreTokenizer((_QWEN2,)),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o": PreTokenizer((_GPT4O,)),
    "minimax-m2": PreTokenizer((_GPT4O,)),
    "seed-coder": PreTokenizer((_SEED,)),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            _DEEPSEEK_PUNCTUATION,
            r"\s+$",
            _DEEPSEEK_CJK,
        ),
        single_digits=True,
    ),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK), single_digits=True
    ),
    "deepseek-v3": _DEEPSEEK,
    "hunyuan-dense": _DEEPSEEK,
}
"""GGUF name to definition."""
