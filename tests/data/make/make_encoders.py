"""Makes tests/data/encoders.npz: what `transformers` computes with tiny encoders.

Run it with PyTorch, transformers, tokenizers and safetensors installed, from the repository root:

    python tests/data/make/make_encoders.py

Stored per case of tests/models/encoders.py: ``CASE_states`` float32 ``[num_tokens, hidden_size]``,
last hidden states of the first text; ``CASE_embeds`` ``[num_texts, embedding size]``, of models
that embed; ``CASE_scores`` ``[num_texts]``, logits of query and text, of those that score.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.models.encoders import (
    CASES,
    POOLING,
    QUERY,
    SCORERS,
    TEXTS,
    dense_weights,
    write_encoder,
)


def main() -> None:
    stored = {}
    for case in CASES:
        auto = AutoModelForSequenceClassification if case in SCORERS else AutoModel
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            write_encoder(Path(folder), case)
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
            model, info = auto.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
            )
            missing = {key: sorted(info[key]) for key in info if info[key]}
            assert not missing or all("pooler" in str(value) for value in missing.values()), missing
            model.eval()
            if case in SCORERS:
                pairs = [tokenizer(QUERY, text, return_tensors="pt") for text in TEXTS]
                scores = [
                    model(p["input_ids"], attention_mask=p["attention_mask"]).logits for p in pairs
                ]
                stored[f"{case}_scores"] = torch.cat(scores).numpy()[:, 0]
                continue
            states = []
            for text in TEXTS:
                inputs = tokenizer(text, return_tensors="pt")
                output = model(inputs["input_ids"], attention_mask=inputs["attention_mask"])
                states.append(output.last_hidden_state[0].double().numpy())
        stored[f"{case}_states"] = states[0].astype(np.float32)
        embeds = []
        for one in states:
            pooled = one.mean(axis=0) if POOLING[case] == "mean" else one[0]
            for weight in dense_weights() if case == "gemma" else ():
                pooled = weight @ pooled
            embeds.append(pooled / np.linalg.norm(pooled))
        stored[f"{case}_embeds"] = np.array(embeds, np.float32)
    for name, values in stored.items():
        print(name, values.shape, values.ravel()[:4])
    np.savez_compressed(Path(__file__).parents[1] / "encoders.npz", **stored)


if __name__ == "__main__":
    main()
