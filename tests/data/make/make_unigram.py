"""Makes tests/data/unigram.npz: a small unigram vocabulary and the ids that SentencePiece gives.

Run it with sentencepiece, protobuf and NumPy installed, from the repository root:

    python tests/data/make/make_unigram.py

Stored in the order of XLM-RoBERTa's converters: ``tokens``, ``scores``, ``types`` (of GGUF) and
``charsmap`` (normalisation); ``texts`` and, one after the other, their ``ids``, ``lengths`` each.
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

ROOT = Path(__file__).parents[3]
TEXTS = (
    "The engine reads a prompt once.",
    "  many   blanks between \t words ",
    "ﬁne and ½ of \uff34\uff28\uff29\uff33, in full width",
    "unknown: 漢字 漢",
    "",
    "tokens,tokens.Tokens",
)
RULES = {
    "ﬁ": "fi",
    "½": "1/2",
    "\uff34": "T",
    "\uff28": "H",
    "\uff29": "I",
    "\uff33": "S",
    "\t": " ",
}


def main() -> None:
    rules = "".join(
        f"{' '.join(f'{ord(c):X}' for c in old)}\t{' '.join(f'{ord(c):X}' for c in new)}\n"
        for old, new in RULES.items()
    )
    model_file = io.BytesIO()
    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as tsv:
        tsv.write(rules)
        tsv.flush()
        lines = [one for one in (ROOT / "README.md").read_text().splitlines() if one.strip()]
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model_file,
            model_type="unigram",
            vocab_size=400,
            normalization_rule_tsv=tsv.name,
            minloglevel=2,
        )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model_file.getvalue())
    proto = sentencepiece_model_pb2.ModelProto.FromString(model_file.getvalue())
    pieces = proto.pieces[3:]
    ids = [
        [0, *(3 if one == processor.unk_id() else one + 1 for one in processor.encode(text)), 2]
        for text in TEXTS
    ]
    np.savez_compressed(
        Path(__file__).parents[1] / "unigram.npz",
        tokens=np.array(["<s>", "<pad>", "</s>", "<unk>", *(one.piece for one in pieces)]),
        scores=np.array([0, 0, 0, 0, *(one.score for one in pieces)], np.float32),
        types=np.array([3, 3, 3, 2, *[1] * len(pieces)], np.int32),
        charsmap=np.frombuffer(proto.normalizer_spec.precompiled_charsmap, np.uint8),
        texts=np.array(TEXTS),
        ids=np.concatenate(ids).astype(np.int32),
        lengths=np.array([len(one) for one in ids], np.int32),
    )


if __name__ == "__main__":
    main()
