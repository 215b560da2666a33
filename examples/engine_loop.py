"""Drive the engine step by step: add requests while others run, stream all of them, abort one.

python examples/engine_loop.py [MODEL]
"""

import sys

from tellin import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
params = SamplingParams(
    temperature=0, max_tokens=20, ignore_eos=True, output_kind=RequestOutputKind.DELTA
)
texts: dict[str, str] = {}

with LLMEngine.from_engine_args(EngineArgs(model=model, download=True)) as engine:
    engine.add_request("early", "The sun rises in the", params)
    engine.add_request("unwanted", "This will never be finished:", params)
    num_steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            texts[output.request_id] = texts.get(output.request_id, "") + output.outputs[0].text
        num_steps += 1
        if num_steps == 5:  # joins the batch that is running
            engine.add_request("late", "One, two, three,", params)
            engine.abort_request(["unwanted"])

for request_id, text in texts.items():
    print(f"{request_id}: {text!r}")
print(f"{num_steps} steps")
