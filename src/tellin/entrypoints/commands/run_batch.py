"""``tellin run-batch``: answer a file of requests in OpenAI's batch format."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tellin.entrypoints.commands.common import download_progress, enable_logging, parse_assignment
from tellin.entrypoints.commands.serve import check_extra
from tellin.exceptions import InvalidParameterError

if TYPE_CHECKING:
    from tellin.config import EngineArgs
    from tellin.entrypoints.openai.batch import BatchFiles

DESCRIPTION = """\
Answer the requests of a file, one JSON object per line, in OpenAI's batch format. Answers are
appended to the output as they are ready, in any order. Run again after an interruption: lines that
have an answer are not asked again. Needs the extra 'server'."""

EXAMPLES = """\
examples:
  tellin run-batch -i requests.jsonl -o answers.jsonl
  tellin run-batch -i requests.jsonl -o answers.jsonl -m ./model.gguf --set max_num_seqs=32

a line of the input:
  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
   "body": {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 50}}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("-i", "--input", required=True, type=Path, metavar="FILE")
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="FILE")
    group = parser.add_argument_group("model")
    group.add_argument(
        "-m",
        "--model",
        default="smollm2",
        help="a .gguf file, a model folder, or a name (default: %(default)s)",
    )
    group.add_argument(
        "--served-model-name",
        action="append",
        default=[],
        metavar="NAME",
        help="name that requests use for the model (repeatable; default: MODEL)",
    )
    group.add_argument("--threads", type=int, metavar="N", help="threads (default: all cores)")
    group.add_argument("--max-model-len", type=int, metavar="N", help="longest prompt + output")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any other engine argument (repeatable)",
    )
    group.add_argument("-v", "--verbose", action="store_true", help="log to standard error")


def run(args: argparse.Namespace) -> int:
    """Answer all lines; exit code 1 if some of them were refused."""
    check_extra()
    if args.verbose:
        enable_logging()
    from tellin.entrypoints.openai.batch import BatchFiles

    if not args.input.is_file():
        raise InvalidParameterError(f"there is no file {args.input}", parameter="--input")
    if args.output.exists() and args.output.samefile(args.input):
        raise InvalidParameterError("input and output are the same file", parameter="--output")
    if args.output.exists() and not args.output.is_file():
        raise InvalidParameterError(
            f"{args.output} is no regular file, which the output has to be: what is in it is read "
            "to go on after an interruption",
            parameter="--output",
        )
    files = BatchFiles(args.input, args.output)
    try:
        files.open().close()  # faults of the files are told before the model is loaded
    except OSError as error:
        raise InvalidParameterError(f"{error}", parameter="--output") from None
    num_failed = asyncio.run(_run(args, files, _engine_args(args)))
    if num_failed:
        print(f"{num_failed} requests were refused; see {args.output}", file=sys.stderr)
    return 1 if num_failed else 0


def _engine_args(args: argparse.Namespace) -> EngineArgs:
    from tellin.config import EngineArgs
    from tellin.loading import resolve_model
    from tellin.settings import Settings

    path = resolve_model(
        args.model, Settings.from_environ(), download=True, progress=download_progress()
    )
    values = {
        "model": path,
        "num_threads": args.threads,
        "max_model_len": args.max_model_len,
        "served_model_name": (args.served_model_name or [args.model])[0],
    }
    return EngineArgs.from_dict(values | dict(parse_assignment(text) for text in args.set))


async def _run(args: argparse.Namespace, files: BatchFiles, engine_args: EngineArgs) -> int:
    from tqdm import tqdm

    from tellin.engine.async_llm import AsyncLLM
    from tellin.entrypoints.openai.batch import BatchRunner
    from tellin.entrypoints.openai.server_config import ServerConfig
    from tellin.entrypoints.openai.serving import ServingContext

    num_failed = 0
    names = tuple(args.served_model_name) or (args.model,)
    config = ServerConfig(served_model_names=names, request_timeout_s=None)
    async with AsyncLLM.from_engine_args(engine_args, multiprocess_mode=False) as engine:
        runner = BatchRunner(ServingContext(engine, config))
        bar = tqdm(
            total=files.num_lines,
            initial=len(files.done),
            unit="request",
            disable=not sys.stderr.isatty(),
        )

        def on_done(succeeded: bool) -> None:
            nonlocal num_failed
            num_failed += not succeeded
            bar.update()

        with bar:
            await runner.run(files, on_done)
    return num_failed
