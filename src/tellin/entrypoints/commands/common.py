"""What several commands share: arguments for model and sampling, opening a model, Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from tellin.exceptions import InvalidParameterError
from tellin.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tellin.entrypoints.llm import LLM
    from tellin.entrypoints.output_stream import OutputStream
    from tellin.loading.pip_download import ProgressCallback

DEFAULT_MODEL = "smollm2"
DEFAULT_TEMPERATURE = 0.7
"""Where sampling is wanted and the model names no temperature of its own."""


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that say which model runs how."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "-m",
        "--model",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help="a .gguf file, a model folder, or a name (see 'tellin models'); a known name is "
        "pulled on first use (default: %(default)s)",
    )
    group.add_argument("--threads", type=int, metavar="N", help="threads (default: all cores)")
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="longest prompt + output in tokens (default: what model and memory allow)",
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any other engine argument, such as kv_cache_dtype=int8 (repeatable); "
        "--kv-cache-dtype int8 means the same",
    )
    group.add_argument("-v", "--verbose", action="store_true", help="log to standard error")


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that say how tokens are chosen."""
    group = parser.add_argument_group("sampling (default: the model's own)")
    group.add_argument("-n", "--max-tokens", type=int, metavar="N", help="most tokens to generate")
    group.add_argument("-t", "--temperature", type=float, metavar="T", help="0 = most likely token")
    group.add_argument("--top-p", type=float, metavar="P")
    group.add_argument("--top-k", type=int, metavar="K")
    group.add_argument("--min-p", type=float, metavar="P")
    group.add_argument("--repetition-penalty", type=float, metavar="R")
    group.add_argument("--seed", type=int, metavar="S", help="make sampling reproducible")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text (repeatable)"
    )


SAMPLING_NAMES = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "seed",
    "stop",
)


def sampling_params(args: argparse.Namespace, llm: LLM, **defaults: Any) -> SamplingParams:
    """From the command line; what it leaves open from the model, then from ``defaults``."""
    given = {name: getattr(args, name) for name in SAMPLING_NAMES}
    values = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(**{**defaults, **llm.model_config.generation_defaults, **values})


def open_llm(args: argparse.Namespace) -> LLM:
    """Load the model that the arguments name, pulling it first if it is known and not there."""
    if args.verbose:
        enable_logging()
    engine_args = dict(parse_assignment(text) for text in args.set)
    from tellin.entrypoints.llm import LLM
    from tellin.loading import resolve_model
    from tellin.settings import Settings

    path = resolve_model(
        args.model, Settings.from_environ(), download=True, progress=download_progress()
    )
    return LLM(
        path,
        **{
            "num_threads": args.threads,
            "max_model_len": args.max_model_len,
            "served_model_name": args.model,
            **engine_args,
        },
    )


def parse_assignment(text: str) -> tuple[str, Any]:
    """``name=value``, where the value is JSON if it can be read as such, else text."""
    import json

    name, separator, value = text.partition("=")
    if not separator or not name:
        raise InvalidParameterError(
            f"--set needs NAME=VALUE, got {text!r}", parameter="--set", value=text
        )
    name = name.strip().replace("-", "_")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):  # no JSON, or more digits or brackets than Python reads
        literals = {"True": True, "False": False, "None": None}
        return name, literals.get(value, value)


def add_image_argument(parser: argparse.ArgumentParser, what: str) -> None:
    """``--image``, for models that see images; ``what`` they go with."""
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help=f"picture that goes with {what} (repeatable; the model must see images)",
    )


def read_images(names: Sequence[str]) -> list[bytes]:
    """Contents of image files.

    Raises:
        InvalidParameterError: one cannot be read.
    """
    images = []
    for name in names:
        try:
            images.append(Path(name).expanduser().read_bytes())
        except OSError as error:
            raise InvalidParameterError(
                f"{name}: {error.strerror or error}", parameter="--image", value=name
            ) from None
    return images


def user_message(text: str, images: Sequence[bytes]) -> dict[str, Any]:
    """A message of a conversation, its pictures before its text."""
    if not images:
        return {"role": "user", "content": text}
    parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def read_stdin() -> str:
    """All of standard input; at a terminal it is said that something is waited for."""
    if sys.stdin.isatty():
        print("reading standard input; Ctrl-D on a line of its own ends it", file=sys.stderr)
    return sys.stdin.read()


def enable_logging() -> None:
    """Show tellin's log on standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("tellin")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def download_progress() -> ProgressCallback:
    """A progress bar on standard error, if that is a terminal; it appears with the first bytes."""
    bar: Any = None

    def update(num_bytes: int, total: int) -> None:
        nonlocal bar
        if not sys.stderr.isatty():
            return
        if bar is None:
            from tqdm import tqdm

            bar = tqdm(total=total, unit="B", unit_scale=True, desc="Downloading")
        bar.update(num_bytes - bar.n)
        if num_bytes >= total:
            bar.close()

    return update


@contextlib.contextmanager
def interruptible(stream: OutputStream) -> Iterator[OutputStream]:
    """Ctrl-C ends the stream between two steps of the engine, never inside one.

    The loop over the stream then raises `KeyboardInterrupt`, and the engine stays usable.
    """

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        stream.interrupt(KeyboardInterrupt())

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        with stream:
            yield stream
    finally:
        signal.signal(signal.SIGINT, previous)
