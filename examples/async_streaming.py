"""Several streams at once on an event loop, as a server has them; one is left early.

python examples/async_streaming.py [MODEL]
"""

import asyncio
import sys

from tellin import AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
params = SamplingParams(temperature=0, max_tokens=24, output_kind=RequestOutputKind.DELTA)


async def answer(engine: AsyncLLM, prompt: str, request_id: str, enough: int) -> str:
    text = prompt
    async for delta in engine.generate(prompt, params, request_id):
        text += delta.outputs[0].text
        if len(text) > enough:
            break  # aborts the request
    return text


async def main() -> None:
    engine = AsyncLLM.from_engine_args(
        EngineArgs(model=model, max_model_len=1024, download=True), multiprocess_mode=False
    )
    try:
        texts = await asyncio.gather(
            answer(engine, "The sun rises in the", "a", enough=1000),
            answer(engine, "One, two, three,", "b", enough=60),
        )
    finally:
        engine.shutdown()
    for text in texts:
        print(repr(text))


asyncio.run(main())
