"""A conversation of several turns; what was said before comes from the prefix cache.

python examples/chat.py [MODEL]
"""

import sys

from tellin import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
questions = ["What is the capital of France?", "And of Italy?"]
params = SamplingParams(temperature=0, max_tokens=48)

with LLM(model, download=True) as llm:
    messages = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        (output,) = llm.chat(messages, params, use_tqdm=False)
        answer = output.outputs[0].text
        messages.append({"role": "assistant", "content": answer})
        print(f"> {question}\n{answer}")
        print(f"  ({output.num_cached_tokens} of {len(output.prompt_token_ids)} tokens cached)\n")
