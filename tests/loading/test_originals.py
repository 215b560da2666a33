"""Ids equal those of the tokenizers that model makers publish: Llama 3, Qwen, Mistral (two kinds).

The makers' packages are fetched by pip; their vocabularies are written into GGUF files the way
converters do it, and read back by our loader. The oracles know nothing of the `tokenizers` library:
plain byte-pair encoding over the makers' patterns, and the SentencePiece library.
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import unicodedata
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.synthetic import byte_tokens
from tellin.loading.tokenizer import load_tokenizer
from tests.loading.corpus import TEXTS
from tests.loading.gguf_writer import write_gguf

pytestmark = pytest.mark.slow

PACKAGES = ("llama-models==0.3.0", "dashscope==2.0.2", "mistral-common==1.13.1")
NORMAL, CONTROL = 1, 3
ALPHABET = byte_tokens()


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The makers' wheels, unpacked; nothing of them is imported."""
    folder = tmp_path_factory.mktemp("packages")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", f"--dest={folder}", *PACKAGES]
    subprocess.run(command, check=True)
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    return folder


def merge(ranks: dict[bytes, int], piece: bytes, limit: int | None = None) -> list[bytes]:
    """Byte-pair encoding: join the pair of lowest rank (below ``limit``) until none is left."""
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while len(parts) > 1:
        candidates = [
            (ranks[parts[i] + parts[i + 1]], i)
            for i in range(len(parts) - 1)
            if parts[i] + parts[i + 1] in ranks
        ]
        if not candidates or (limit is not None and min(candidates)[0] >= limit):
            break
        i = min(candidates)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def visible(raw: bytes) -> str:
    return "".join(ALPHABET[byte] for byte in raw)


def metadata_of(ranks: dict[bytes, int], pre: str, specials: list[str]) -> dict[str, Any]:
    tokens = [visible(raw) for raw in sorted(ranks, key=ranks.__getitem__)]
    pairs = [merge(ranks, raw, rank) for raw, rank in sorted(ranks.items(), key=lambda x: x[1])]
    types = [NORMAL] * len(tokens) + [CONTROL] * len(specials)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens + specials,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": [" ".join(map(visible, pair)) for pair in pairs if len(pair) == 2],
    }


def expected_ids(
    ranks: dict[bytes, int], pattern: str, specials: list[str], text: str, nfc: bool
) -> list[int]:
    import regex

    ids: list[int] = []
    for segment in re.split(f"({'|'.join(map(re.escape, specials))})", text):
        if segment in specials:
            ids.append(len(ranks) + specials.index(segment))
            continue
        normal = unicodedata.normalize("NFC", segment) if nfc else segment
        for piece in regex.findall(pattern, normal):
            raw = piece.encode()
            ids += [ranks[raw]] if raw in ranks else [ranks[part] for part in merge(ranks, raw)]
    return ids


def read_tiktoken(path: Path) -> dict[bytes, int]:
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in lines}


@pytest.mark.parametrize("name", ["llama-bpe", "qwen2", "tekken"])
def test_byte_level_ids(packages: Path, tmp_path: Path, name: str) -> None:
    if name == "llama-bpe":
        maker = packages / "llama_models/llama3"
        ranks = read_tiktoken(maker / "tokenizer.model")
        pattern = re.findall(r'pat_str = r"(.*)"', (maker / "tokenizer.py").read_text())[0]
        specials = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    elif name == "qwen2":
        maker = packages / "dashscope"
        ranks = read_tiktoken(maker / "resources/qwen.tiktoken")
        source = (maker / "tokenizers/qwen_tokenizer.py").read_text()
        pattern = re.findall(r'r"""(.*)"""', source)[0]
        specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    else:
        file = json.loads((packages / "mistral_common/data/tekken_240911.json").read_text())
        pattern, size = file["config"]["pattern"], file["config"]["default_vocab_size"]
        count = size - file["config"]["default_num_special_tokens"]
        ranks = {base64.b64decode(x["token_bytes"]): x["rank"] for x in file["vocab"][:count]}
        specials = ["<s>", "</s>", "[INST]", "[/INST]"]
    path = write_gguf(tmp_path / "vocabulary.gguf", metadata_of(ranks, name, specials))
    tokenizer = load_tokenizer(path)
    for text in TEXTS:
        expected = expected_ids(ranks, pattern, specials, text, nfc=name == "qwen2")
        assert tokenizer.encode(text, add_special_tokens=False) == expected, text


def random_texts(count: int) -> list[str]:
    generator = np.random.default_rng(11)
    words = ["the", "ing", " ", "  ", "er", "re", "an", "in", "\n", "a", "s", "\u00e9", "\u65e5"]
    return ["".join(generator.choice(words, generator.integers(1, 25))) for _ in range(count)]


def test_sentencepiece_ids(packages: Path, tmp_path: Path) -> None:
    """Mistral 7B's vocabulary, which is of Llama 2's kind."""
    import sentencepiece

    model = packages / "mistral_common/data/tokenizer.model.v1"
    original = sentencepiece.SentencePieceProcessor(model_file=str(model))
    ids = range(original.get_piece_size())
    kinds = {2: original.is_unknown, 3: original.is_control, 6: original.is_byte}
    types = [next((kind for kind, test in kinds.items() if test(i)), NORMAL) for i in ids]
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [original.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": np.array([original.get_score(i) for i in ids], np.float32),
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    tokenizer = load_tokenizer(write_gguf(tmp_path / "vocabulary.gguf", metadata))
    for text in (*TEXTS, *random_texts(2000)):
        expected = original.encode(text)
        assert tokenizer.encode(text, parse_special=False)[1:] == expected, text
        assert tokenizer.decode(expected) == original.decode(expected), text
