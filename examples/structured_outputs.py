"""Outputs that must match a JSON schema, a regular expression, or one of some choices.

python examples/structured_outputs.py [MODEL]
"""

import json
import sys

from tellin import LLM, SamplingParams, StructuredOutputsParams

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
schema = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "country": {"type": "string"}},
    "required": ["city", "country"],
    "additionalProperties": False,  # otherwise a schema allows properties that it does not name
}
tasks = [
    ("Name a city, as JSON.", StructuredOutputsParams(json=schema)),
    ("When did Apollo 11 land? Write the date.", StructuredOutputsParams(regex="[0-9-]{10}")),
    ("Is this a happy text? I like it!", StructuredOutputsParams(choice=["yes", "no"])),
]

with LLM(model, max_model_len=1024, download=True) as llm:
    outputs = llm.chat(
        [[{"role": "user", "content": text}] for text, _ in tasks],
        [SamplingParams(temperature=0, max_tokens=100, structured_outputs=s) for _, s in tasks],
    )
    for output in outputs:
        print(output.outputs[0].text)
    print(json.loads(outputs[0].outputs[0].text)["city"])
