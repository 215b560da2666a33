"""Makes tests/data/smollm2.npz: what `transformers` computes from SmolLM2, dequantised to float32.

Run it with PyTorch, transformers and gguf installed, from the repository root:

    python tests/data/make/make_smollm2.py PATH/SmolLM2-135M-Instruct.Q4_1.gguf

Stored:
    text_ids        the first 2,000 token ids of benchmarks/data/fidelity.txt
    top_ids, top_logits, logsumexp
                    the 20 largest logits and the logarithm of the sum of the exponentials, at the
                    first 64 positions of the text
    far_positions, far_top_ids, far_top_logits, far_logsumexp
                    the same at some later positions
    chat_prompt_ids, chat_output_ids
                    "What is the capital of France?" in the chat template, and its greedy answer
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NUM_POSITIONS = 64
NUM_TEXT_TOKENS = 2000
TOP = 20
FAR_POSITIONS = [127, 255, 511, 777, 1023, 1499, 1999]


def top_of(logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    top = logits.topk(TOP, dim=-1)
    return (
        top.indices.numpy().astype(np.int32),
        top.values.numpy(),
        logits.double().logsumexp(-1).numpy(),
    )


def main() -> None:
    gguf = Path(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    text = Path("benchmarks/data/fidelity.txt").read_text(encoding="utf-8")
    text_ids = tokenizer(text)["input_ids"][:NUM_TEXT_TOKENS]
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([text_ids])).logits[0]
        answer = model.generate(
            torch.tensor([prompt_ids]), do_sample=False, max_new_tokens=40, num_beams=1
        )[0, len(prompt_ids) :]
    top_ids, top_logits, logsumexp = top_of(logits[:NUM_POSITIONS])
    far_ids, far_logits, far_logsumexp = top_of(logits[FAR_POSITIONS])
    print("answer:", repr(tokenizer.decode(answer)))
    path = Path("tests/data/smollm2.npz")
    np.savez_compressed(
        path,
        text_ids=np.array(text_ids, dtype=np.int32),
        top_ids=top_ids,
        top_logits=top_logits,
        logsumexp=logsumexp,
        far_positions=np.array(FAR_POSITIONS, dtype=np.int32),
        far_top_ids=far_ids,
        far_top_logits=far_logits,
        far_logsumexp=far_logsumexp,
        chat_prompt_ids=np.array(prompt_ids, dtype=np.int32),
        chat_output_ids=answer.numpy().astype(np.int32),
    )
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
