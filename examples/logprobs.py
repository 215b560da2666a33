"""How sure the model was of each token, and what it might have said instead.

python examples/logprobs.py [MODEL]
"""

import sys
from math import exp

from tellin import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
params = SamplingParams(temperature=0, max_tokens=6, logprobs=3)

with LLM(model, download=True) as llm:
    (output,) = llm.generate("Two plus two equals", params, use_tqdm=False)
    completion = output.outputs[0]
    for token_id, candidates in zip(completion.token_ids, completion.logprobs, strict=True):
        others = ", ".join(
            f"{c.decoded_token!r} {exp(c.logprob):.0%}"
            for other_id, c in candidates.items()
            if other_id != token_id
        )
        chosen = candidates[token_id]
        print(f"{chosen.decoded_token!r:12} {exp(chosen.logprob):4.0%}   instead: {others}")
