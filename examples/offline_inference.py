"""Answer a list of prompts at once: they share every step of the engine.

python examples/offline_inference.py [MODEL]
"""

import sys

from tellin import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
prompts = [
    "The capital of France is",
    "Once upon a time, a small shell",
    "def fibonacci(n):",
    "The three primary colours are",
]

with LLM(model, download=True) as llm:
    for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24)):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
