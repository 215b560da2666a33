"""Makes tests/data/NAME.npz: what `transformers` computes from a GGUF model in float32.

Run it with PyTorch, transformers and gguf installed, from the repository root:

    python tests/data/make/make_golden_logits.py smollm2 PATH/SmolLM2-135M-Instruct.Q4_1.gguf
    python tests/data/make/make_golden_logits.py gemma3 PATH/gemma-3-270m-q4_k_m.gguf

Stored:
    text_ids        the first token ids of benchmarks/data/fidelity.txt
    top_ids, top_logits, logsumexp
                    the 20 largest logits and the logarithm of the sum of the exponentials, at the
                    first 64 positions of the text
    far_positions, far_top_ids, far_top_logits, far_logsumexp
                    the same at some later positions
    prompt_ids, output_ids
                    a prompt (of a chat model: in its template) and its greedy continuation
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NUM_POSITIONS = 64
NUM_TEXT_TOKENS = {"smollm2": 2000, "gemma3": 800}
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
    name, gguf = sys.argv[1], Path(sys.argv[2])
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    text = Path("benchmarks/data/fidelity.txt").read_text(encoding="utf-8")
    text_ids = tokenizer(text)["input_ids"][: NUM_TEXT_TOKENS[name]]
    far_positions = [position for position in FAR_POSITIONS if position < len(text_ids)]
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        prompt_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True).input_ids
    else:
        prompt_ids = tokenizer("The capital of France is").input_ids
    with torch.no_grad():
        logits = model(torch.tensor([text_ids])).logits[0]
        answer = model.generate(
            torch.tensor([prompt_ids]), do_sample=False, max_new_tokens=40, num_beams=1
        )[0, len(prompt_ids) :]
    top_ids, top_logits, logsumexp = top_of(logits[:NUM_POSITIONS])
    far_ids, far_logits, far_logsumexp = top_of(logits[far_positions])
    print("prompt:", repr(tokenizer.decode(prompt_ids)))
    print("answer:", repr(tokenizer.decode(answer)))
    path = Path(f"tests/data/{name}.npz")
    np.savez_compressed(
        path,
        text_ids=np.array(text_ids, dtype=np.int32),
        top_ids=top_ids,
        top_logits=top_logits,
        logsumexp=logsumexp,
        far_positions=np.array(far_positions, dtype=np.int32),
        far_top_ids=far_ids,
        far_top_logits=far_logits,
        far_logsumexp=far_logsumexp,
        prompt_ids=np.array(prompt_ids, dtype=np.int32),
        output_ids=answer.numpy().astype(np.int32),
    )
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
