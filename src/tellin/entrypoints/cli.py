"""The command ``tellin``: finds the command's module, parses arguments, maps errors to exit codes.

Exit codes: 0 done, 1 it failed, 2 wrong usage, 130 interrupted. An error is one line on standard
error, without a traceback.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

COMMANDS = {
    "generate": "complete or answer a prompt",
    "chat": "talk to a model",
    "embed": "turn texts into vectors, or rank them by similarity",
    "serve": "serve a model over HTTP with OpenAI's API",
    "run-batch": "answer a file of requests in OpenAI's batch format",
    "bench": "measure a server, or an engine in this process",
    "pull": "fetch a model into the model store",
    "models": "list known and pulled models",
    "plan": "print the operations a model was compiled to",
    "profile": "measure which operations of a model take the time",
}
"""Command, and what it does. The module is `tellin.entrypoints.commands.<command>`, with
underscores for dashes."""

EPILOG = """\
examples:
  tellin pull smollm2
  tellin generate "What is the capital of France?"
  tellin chat --model ./model.gguf
  tellin serve smollm2
  tellin COMMAND --help
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    _open_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character is no error
    if hasattr(sys.stdin, "reconfigure"):  # bytes that are no text: the tokenizer names them
        sys.stdin.reconfigure(errors="surrogateescape")
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _silence_stdout()
        return EXIT_BROKEN_PIPE
    except OSError as error:  # what a command can explain it has caught; a full disk, say
        print(f"tellin: error: {error}", file=sys.stderr)
        _silence_stdout()
        return EXIT_ERROR


def _open_missing_streams() -> None:
    """A stream that the caller has closed is None in Python: read nothing, write to nowhere."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _run(arguments: list[str]) -> int:
    if arguments[:1] in (["--version"], ["-V"]):
        from tellin import __version__

        print(f"tellin {__version__}")
        return EXIT_OK
    command = arguments[0] if arguments and arguments[0] in COMMANDS else None
    if command is None:
        return _no_command(arguments)
    module = import_module(f"tellin.entrypoints.commands.{command.replace('-', '_')}")
    parser = _make_parser(f"tellin {command}", module.DESCRIPTION, module.EXAMPLES)
    module.add_arguments(parser)
    if parser.get_default("set") is not None:
        from tellin.entrypoints.commands.engine_options import add_engine_options

        add_engine_options(parser)
    from tellin.exceptions import InvalidParameterError, TellinError

    try:
        args, unknown = parser.parse_known_args(arguments[1:])
        if unknown:
            parser.error(_unrecognized(unknown, parser.format_usage()))
        code: int = module.run(args)
        sys.stdout.flush()
        return code
    except SystemExit as exc:  # argparse has printed its message
        return exc.code if isinstance(exc.code, int) else EXIT_USAGE
    except InvalidParameterError as error:
        print(f"tellin {command}: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except TellinError as error:
        print(f"tellin {command}: error: {error}", file=sys.stderr)
        return EXIT_ERROR


def _unrecognized(unknown: list[str], usage: str) -> str:
    """The message about options that a command lacks."""
    from tellin.config import UNSUPPORTED_ENGINE_ARGS

    message = f"unrecognized arguments: {' '.join(unknown)}"
    for argument in unknown:
        if not argument.startswith("--"):
            continue
        name = argument.partition("=")[0].removeprefix("--").replace("-", "_")
        option = f"--{name.replace('_', '-')}"
        if f"[{option} " in usage:
            hint = f"it is written {option}"
        elif name == "model":
            hint = "the model is given without --model"
        elif "[--set " not in usage:
            continue
        elif name in UNSUPPORTED_ENGINE_ARGS:
            hint = f"{option} is not supported: {UNSUPPORTED_ENGINE_ARGS[name]}"
        elif name in _OTHER_OPTIONS:
            hint = f"{option}: {_OTHER_OPTIONS[name]}"
        else:
            continue
        message += f"\n  {hint}"
    if not unknown[0].startswith("-") and "[--set " in usage:
        message += "\n  an option takes one value; one that is repeatable is written once for each"
    return message


_OTHER_OPTIONS = {
    "allowed_origins": "write --allowed-origin once for each",
    "api_server_count": "one process serves",
    "enable_auto_tool_choice": "leave it out, tools work as they are",
    "ssl_certfile": "put a proxy that speaks TLS in front",
    "ssl_keyfile": "put a proxy that speaks TLS in front",
    "uvicorn_log_level": "--quiet shows warnings and errors only",
}
"""Options of vLLM's server that are no engine arguments, and what to do instead."""


def _no_command(arguments: list[str]) -> int:
    parser = _make_parser("tellin", "LLM inference on ordinary machines.", EPILOG)
    parser.add_argument("-V", "--version", action="store_true", help="print the version")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name, help_text in COMMANDS.items():
        subparsers.add_parser(name, help=help_text, add_help=False)
    try:
        parser.parse_args(arguments)
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else EXIT_USAGE
    parser.print_help(sys.stderr)
    return EXIT_USAGE


def _make_parser(prog: str, description: str, examples: str) -> argparse.ArgumentParser:
    import argparse

    return argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _silence_stdout() -> None:
    """The reader is gone: nothing may be written any more, not even when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
