"""Print an answer while it is written. `LLM.stream` is a plain iterator: no event loop, no thread.

python examples/streaming.py [MODEL]
"""

import sys

from tellin import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
prompt = "A short story about a lighthouse:"

with LLM(model, download=True) as llm:
    print(prompt, end="")
    for delta in llm.stream(prompt, SamplingParams(temperature=0, max_tokens=60)):
        print(delta.outputs[0].text, end="", flush=True)
    print()
