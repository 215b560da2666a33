"""``tellin generate``: one prompt or several, answered on standard output."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tellin.entrypoints.commands.common import (
    DEFAULT_TEMPERATURE,
    add_image_argument,
    add_model_arguments,
    add_sampling_arguments,
    interruptible,
    open_llm,
    read_images,
    read_stdin,
    sampling_params,
    user_message,
)
from tellin.exceptions import InvalidParameterError

if TYPE_CHECKING:
    from tellin.entrypoints.llm import LLM
    from tellin.outputs import RequestOutput
    from tellin.sampling_params import SamplingParams

DESCRIPTION = """\
Answer a prompt, or several. A model that has a chat template gets the prompt as a user's message;
with --raw, and for other models, the prompt is continued as it is."""

EXAMPLES = """\
examples:
  tellin generate "What is the capital of France?"
  tellin generate --raw --temperature 0.8 --seed 1 "Once upon a time"
  git diff | tellin generate --system "Summarise this change in one line." -
  tellin generate --model smolvlm/ --image photo.jpg "What is this?"
  tellin generate --json "What is 2 + 2?" "Name a river." | jq .text
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "prompt", nargs="*", help="prompts; - (or none) reads one from standard input"
    )
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is")
    parser.add_argument("--system", metavar="TEXT", help="system message of the chat template")
    parser.add_argument(
        "--count", type=int, default=1, metavar="N", help="completions per prompt (default: 1)"
    )
    add_image_argument(parser, "each prompt; with --raw the prompt says where")
    parser.add_argument("--json", action="store_true", help="one JSON object per completion")
    add_model_arguments(parser)
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Answer the prompts."""
    if args.raw and args.system is not None:
        raise InvalidParameterError(
            "--system needs the chat template, which --raw leaves out", parameter="--system"
        )
    prompts = args.prompt or ["-"]
    if prompts.count("-") > 1:
        raise InvalidParameterError("standard input (-) can be read once", parameter="prompt")
    prompts = [read_stdin().strip() if prompt == "-" else prompt for prompt in prompts]
    images = read_images(args.image)
    with open_llm(args) as llm:
        # Greedy where one answer is wanted: the same each time. Several have to differ.
        temperature = 0.0 if args.count == 1 else DEFAULT_TEMPERATURE
        params = sampling_params(args, llm, n=args.count, temperature=temperature, max_tokens=None)
        is_chat = not args.raw and llm.model_config.chat_template is not None
        if args.system is not None and not is_chat:
            raise InvalidParameterError(
                "--system needs a chat template, which this model does not have",
                parameter="--system",
            )
        if is_chat:
            requests: list[Any] = [_messages(prompt, images, args.system) for prompt in prompts]
        else:
            requests = [_raw_prompt(prompt, images) for prompt in prompts]
        if len(requests) == 1 and args.count == 1 and not args.json:
            _print_stream(llm, requests[0], params)
        else:
            call = llm.chat if is_chat else llm.generate
            _print_outputs(call(requests, params), prompts, as_json=args.json)
    return 0


def _messages(prompt: str, images: Sequence[bytes], system: str | None) -> list[dict[str, Any]]:
    messages = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, user_message(prompt, images)]


def _raw_prompt(prompt: str, images: Sequence[bytes]) -> Any:
    if not images:
        return prompt
    return {"prompt": prompt, "multi_modal_data": {"image": list(images)}}


def _print_stream(llm: LLM, request: Any, params: SamplingParams) -> None:
    with interruptible(llm.stream(request, params)) as stream:
        for output in stream:
            print(output.text, end="", flush=True)
    print()


def _print_outputs(outputs: list[RequestOutput], prompts: list[str], *, as_json: bool) -> None:
    import json

    is_first = True
    for prompt, output in zip(prompts, outputs, strict=True):
        for completion in output.outputs:
            if as_json:
                record = {
                    "prompt": prompt,
                    "index": completion.index,
                    "text": completion.text,
                    "finish_reason": completion.finish_reason,
                    "stop_reason": completion.stop_reason,
                    "num_prompt_tokens": len(output.prompt_token_ids or ()),
                    "num_completion_tokens": len(completion.token_ids),
                }
                print(json.dumps(record, ensure_ascii=False))
            else:
                if not is_first:
                    print("---")
                print(completion.text)
            is_first = False
