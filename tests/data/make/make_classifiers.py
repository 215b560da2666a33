"""Makes tests/data/classifiers.npz: logits that `transformers` computes with tiny classifiers.

Run it with PyTorch, transformers, tokenizers and safetensors installed, from the repository root:

    python tests/data/make/make_classifiers.py

Stored per case of tests/models/classifiers.py: ``CASE_texts`` float32 ``[num_documents,
num_labels]``, logits of each document alone, and ``CASE_pairs``, of the query with each document;
``CASE_ids`` and ``CASE_types``, the tokens of the query with the last document.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.models.classifiers import CASES, DOCUMENTS, QUERY, write_classifier


def main() -> None:
    stored = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            write_classifier(Path(folder), case)
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
            model = AutoModelForSequenceClassification.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager"
            ).eval()
        has_types = getattr(model.config, "type_vocab_size", 1) > 1

        def logits(*texts: str) -> np.ndarray:
            inputs = tokenizer(*texts, return_tensors="pt", return_token_type_ids=True)  # noqa: B023
            if not has_types:  # noqa: B023
                inputs.pop("token_type_ids", None)
            with torch.no_grad():
                return model(**inputs).logits[0].numpy()  # noqa: B023

        stored[f"{case}_texts"] = np.array([logits(text) for text in DOCUMENTS])
        stored[f"{case}_pairs"] = np.array([logits(QUERY, text) for text in DOCUMENTS])
        pair = tokenizer(QUERY, DOCUMENTS[-1], return_token_type_ids=True)
        stored[f"{case}_ids"] = np.array(pair["input_ids"], np.int32)
        stored[f"{case}_types"] = np.array(pair["token_type_ids"], np.int32)
        print(case, stored[f"{case}_texts"].tolist(), stored[f"{case}_pairs"].tolist())
    np.savez_compressed(Path(__file__).parents[1] / "classifiers.npz", **stored)


if __name__ == "__main__":
    main()
