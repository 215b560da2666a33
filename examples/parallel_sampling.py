"""Several different answers to one prompt; a seed makes them the same in every run.

python examples/parallel_sampling.py [MODEL]
"""

import sys

from tellin import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
params = SamplingParams(n=3, temperature=0.9, top_p=0.95, seed=7, max_tokens=24)

with LLM(model, download=True) as llm:
    (output,) = llm.generate("My favourite sea animal is", params, use_tqdm=False)
    for completion in output.outputs:
        print(f"{completion.index}: {completion.text!r} ({completion.finish_reason})")
