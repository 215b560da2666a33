"""Makes ``tests/data/tokenizer/*.json``: what the original tokenizers give for the corpus.

Run it with a Python that has llama-cpp-python, transformers, sentencepiece, protobuf and regex,
with the repository's root on PYTHONPATH, the models pulled, and the wheels of llama-models 0.3.0,
dashscope 2.0.2 and mistral-common 1.13.1 unpacked in one folder:

    python tests/data/make/make_tokenizer_golden.py TELLIN_HOME UNPACKED_WHEELS [PART ...]

- ``smollm2``: llama.cpp's ids (SmolLM2's tokenizer.json is in no package; its rules are GPT-2's
  after cutting out single digits, which is what llama.cpp does for ``smollm``).
- ``minilm``: transformers' ids, from the model's own tokenizer.json.
- ``gemma3``: ids of the SentencePiece library, given the vocabulary in the GGUF file. Control
  tokens in texts are text to it.
- ``pretokenizers``: pieces that the families' own patterns cut, by the ``regex`` package.
"""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from pathlib import Path
from typing import Any

from tests.loading.corpus import DATA, TEXTS

SMOLLM2 = "models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA3 = "models/gemma3-270m/gemma-3-270m-q4_k_m.gguf"
MINILM = "models/minilm"


def smollm2(home: Path, wheels: Path) -> list[list[int]]:
    from llama_cpp import Llama

    model = Llama(str(home / SMOLLM2), vocab_only=True, verbose=False)
    return [model.tokenize(text.encode(), add_bos=False, special=True) for text in TEXTS]


def minilm(home: Path, wheels: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(home / MINILM))
    return [tokenizer.encode(text) for text in TEXTS]


def gemma3(home: Path, wheels: Path) -> list[list[int]]:
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    from tellin.loading.gguf import GGUFFile

    metadata = GGUFFile(home / GEMMA3, read_tensors=False).metadata
    model = sentencepiece_model_pb2.ModelProto()
    for token, score, kind in zip(
        metadata.get_strings("tokenizer.ggml.tokens"),
        metadata.get_numbers("tokenizer.ggml.scores").tolist(),
        metadata.get_numbers("tokenizer.ggml.token_type").tolist(),
        strict=True,
    ):
        piece = token.replace(" ", "\u2581") if kind == 4 else token
        model.pieces.add(piece=piece, score=score, type=2 if token == "<unk>" else kind)
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    trainer.model_type, trainer.byte_fallback = 2, True
    trainer.pad_id, trainer.eos_id, trainer.bos_id, trainer.unk_id = 0, 1, 2, 3
    trainer.pad_piece, trainer.eos_piece, trainer.bos_piece = "<pad>", "<eos>", "<bos>"
    normalizer.name, normalizer.add_dummy_prefix = "identity", False
    normalizer.remove_extra_whitespaces = False
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    return [processor.encode(text) for text in TEXTS]


def pretokenizers(home: Path, wheels: Path) -> dict[str, list[list[str]]]:
    import regex

    llama4 = (wheels / "llama_models/llama4/tokenizer.py").read_text()
    patterns = {
        "llama-bpe": _pattern(wheels / "llama_models/llama3/tokenizer.py", r'pat_str = r"(.*)"'),
        "gpt-4o": re.findall(r'O200K_PATTERN = r"""(.*)"""', llama4)[0],
        "qwen2": _pattern(wheels / "dashscope/tokenizers/qwen_tokenizer.py", r'r"""(.*)"""'),
        "tekken": json.loads((wheels / "mistral_common/data/tekken_240911.json").read_text())[
            "config"
        ]["pattern"],
    }
    pieces: dict[str, list[list[str]]] = {}
    for name, pattern in patterns.items():
        normalize = name == "qwen2"
        texts = [unicodedata.normalize("NFC", text) if normalize else text for text in TEXTS]
        pieces[name] = [regex.findall(pattern, text) for text in texts]
    return pieces


def _pattern(path: Path, wanted: str) -> str:
    return re.findall(wanted, path.read_text())[0]


def main() -> None:
    home, wheels, *names = sys.argv[1:]
    parts: dict[str, Any] = {
        function.__name__: function for function in (smollm2, minilm, gemma3, pretokenizers)
    }
    for name in names or parts:
        golden = parts[name](Path(home), Path(wheels))
        text = json.dumps(golden, separators=(",", ":"))
        (DATA / f"{name}.json").write_text(text.replace("],[", "],\n[") + "\n")


if __name__ == "__main__":
    main()
