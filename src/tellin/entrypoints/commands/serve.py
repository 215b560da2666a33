"""``tellin serve``: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tellin.entrypoints.commands.common import download_progress, parse_assignment
from tellin.exceptions import InvalidParameterError, UnsupportedFeatureError

if TYPE_CHECKING:
    from tellin.config import EngineArgs
    from tellin.entrypoints.openai.server_config import ServerConfig
    from tellin.entrypoints.openai.serving import ServingContext

DESCRIPTION = """\
Serve a model over HTTP with OpenAI's API. Any client of OpenAI's works: point it to the URL that is
printed at start, with /v1 behind it. Needs the extra 'server'."""

EXAMPLES = """\
examples:
  tellin serve
  tellin serve ./model.gguf --port 8080 --api-key-file keys.txt --host 0.0.0.0
  tellin serve smollm2 --kv-cache-dtype int8 --max-num-seqs 64
  tellin serve smollm2 --lora sql=./adapters/sql --lora poems=./adapters/poems
  tellin serve minilm --served-model-name text-embedding
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Hello!"}]}'

SIGTERM or Ctrl-C: open requests are finished (see --drain-timeout), then the server ends.
"""

DEFAULT_MODEL = "smollm2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        help="a .gguf file, a model folder, or a name (default: %(default)s)",
    )
    add_engine_arguments(parser)
    _add_network_arguments(parser.add_argument_group("network"))
    _add_chat_arguments(parser.add_argument_group("chat"))
    _add_lora_arguments(parser.add_argument_group("LoRA adapters"))
    _add_key_arguments(parser.add_argument_group("keys and limits"))


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments about the engine behind the server."""
    group = parser.add_argument_group("engine")
    group.add_argument("--threads", type=int, metavar="N", help="threads (default: all cores)")
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="longest prompt + output in tokens (default: what model and memory allow)",
    )
    group.add_argument(
        "--served-model-name",
        action="append",
        default=[],
        metavar="NAME",
        help="name of the model in the API (repeatable; default: MODEL)",
    )
    group.add_argument("--chat-template", metavar="FILE", help="Jinja template, or a file with one")
    group.add_argument(
        "--in-process", action="store_true", help="run the engine in a thread, not in a child"
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any other engine argument, such as kv_cache_dtype=int8 (repeatable); "
        "--kv-cache-dtype int8 means the same",
    )
    group.add_argument("-q", "--quiet", action="store_true", help="log warnings and errors only")


def _add_network_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    group.add_argument(
        "--port", type=int, default=8000, metavar="N", help="0 = any (default: %(default)s)"
    )
    group.add_argument(
        "--allowed-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="web origin that browsers may call from, * = any (repeatable; default: none)",
    )
    group.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="name in the Host header to answer to, * = any (repeatable; default: any, but on "
        "loopback without keys only names that no web page can have)",
    )
    group.add_argument(
        "--no-page", action="store_true", help="without the page at / and the /engine paths"
    )
    group.add_argument(
        "--drain-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds that open requests get at the end (default: %(default)g)",
    )
    group.add_argument(
        "--health-timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="/health fails after so many seconds without progress (default: %(default)g)",
    )


def _add_chat_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--tool-call-parser",
        default="auto",
        metavar="NAME",
        help="hermes, llama3_json, mistral, nemotron_json, pythonic, lfm2, gemma, qwen3_coder, "
        "apertus, cohere, ernie45, hunyuan_a13b, minimax_m2 or seed_oss "
        "(default: by the template)",
    )
    group.add_argument(
        "--reasoning-parser",
        default="auto",
        metavar="NAME",
        help="think, apertus, cohere, ernie45, hunyuan_a13b, minimax_m2, mistral, seed_oss or none "
        "(default: auto, from the template)",
    )
    group.add_argument(
        "--trust-request-chat-template",
        action="store_true",
        help="let requests bring their own chat template, which is a program",
    )


def _add_lora_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--enable-lora", action="store_true", help="accept adapters (implied by --lora)"
    )
    group.add_argument(
        "--lora",
        "--lora-modules",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="an adapter to load at the start; requests use it as model NAME (repeatable)",
    )


def _add_key_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--api-key", action="append", default=[], metavar="KEY", help="accepted key (repeatable)"
    )
    group.add_argument(
        "--api-key-file",
        action="append",
        default=[],
        metavar="FILE",
        help="file with one key per line: not seen in lists of processes",
    )
    group.add_argument(
        "--enable-admin", action="store_true", help="calls that change the engine (/sleep, ...)"
    )
    group.add_argument("--admin-key", metavar="KEY", help="key of those calls")
    group.add_argument("--admin-key-file", metavar="FILE", help="file that holds it")
    group.add_argument(
        "--max-queue",
        type=int,
        default=256,
        metavar="N",
        help="most sequences that wait; more are refused with 429 (default: %(default)s)",
    )
    group.add_argument(
        "--request-timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="deadline of a request in seconds, 0 = none (default: %(default)g)",
    )
    group.add_argument(
        "--max-body-mb",
        type=int,
        default=32,
        metavar="N",
        help="largest body in megabytes (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    check_extra()
    from tellin.engine.async_llm import AsyncLLM
    from tellin.entrypoints.openai.server import bind, serve

    _log_to_stderr(logging.WARNING if args.quiet else logging.INFO)
    config = server_config(args)
    sock = bind(config)
    engine_args = make_engine_args(args)

    def make_engine() -> AsyncLLM:
        return AsyncLLM.from_engine_args(engine_args, multiprocess_mode=not args.in_process)

    def on_start(context: ServingContext, url: str) -> None:
        print(start_block(context, url), file=sys.stderr, flush=True)

    return serve(config, sock, make_engine, on_start)


def check_extra() -> None:
    """Raise if the packages of the server are not installed."""
    import importlib.util

    needed = ("fastapi", "uvicorn", "zmq")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise UnsupportedFeatureError(
            f"this command needs packages that are not installed ({', '.join(missing)}); "
            "run: pip install 'tellin[server]'"
        )


def server_config(args: argparse.Namespace) -> ServerConfig:
    """What the arguments say about the server."""
    from tellin.entrypoints.openai.server_config import ServerConfig

    keys = [*args.api_key]
    for path in args.api_key_file:
        keys.extend(_lines(path, "--api-key-file"))
    admin_key = args.admin_key
    if args.admin_key_file is not None:
        if admin_key is not None:
            raise InvalidParameterError(
                "give --admin-key or --admin-key-file, not both", parameter="--admin-key-file"
            )
        admin_key = _lines(args.admin_key_file, "--admin-key-file")[0]
    return ServerConfig(
        host=args.host,
        port=args.port,
        served_model_names=tuple(args.served_model_name) or (args.model,),
        api_keys=tuple(keys),
        enable_admin=args.enable_admin,
        admin_key=admin_key,
        allowed_origins=tuple(args.allowed_origin),
        allowed_hosts=tuple(args.allowed_host),
        max_body_bytes=args.max_body_mb << 20,
        request_timeout_s=args.request_timeout or None,
        drain_timeout_s=args.drain_timeout,
        health_timeout_s=args.health_timeout,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        trust_request_chat_template=args.trust_request_chat_template,
        lora_modules=tuple(map(_lora_module, args.lora)),
        enable_page=not args.no_page,
    )


def _lora_module(text: str) -> tuple[str, str]:
    name, separator, path = text.partition("=")
    if not separator or not name or not path:
        raise InvalidParameterError(
            f"--lora needs NAME=PATH, got {text!r}", parameter="--lora", value=text
        )
    return name, os.path.abspath(os.path.expanduser(path))


def _lines(path: str, parameter: str) -> list[str]:
    """Non-empty lines of a file."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as error:  # the last: ~nobody/
        raise InvalidParameterError(
            f"{parameter}: cannot read {path}: {error}", parameter=parameter, value=path
        ) from None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise InvalidParameterError(
            f"{parameter}: {path} holds no key", parameter=parameter, value=path
        )
    return lines


def make_engine_args(args: argparse.Namespace) -> EngineArgs:
    """What the arguments say about the engine; pulls the model if it is known and not there."""
    from tellin.config import EngineArgs
    from tellin.loading import resolve_model
    from tellin.settings import Settings

    path = resolve_model(
        args.model, Settings.from_environ(), download=True, progress=download_progress()
    )
    values: dict[str, Any] = {
        "model": path,
        "served_model_name": (args.served_model_name or [args.model])[0],
        "num_threads": args.threads,
        "max_model_len": args.max_model_len,
        "chat_template": args.chat_template,
        "max_num_queued_reqs": args.max_queue,
    }
    if args.enable_lora or args.lora:
        values |= {"enable_lora": True, "max_loras": max(1, len(args.lora))}
    return EngineArgs.from_dict(values | dict(parse_assignment(text) for text in args.set))


def start_block(context: ServingContext, url: str) -> str:
    """What one wants to know when it starts."""
    ready = context.engine.engine_core.ready
    num_tokens = ready.kv_cache_size_tokens or (ready.num_kv_blocks - 1) * ready.block_size
    model = context.engine.model_config
    keys = f"{len(context.config.api_keys)} API keys" if context.config.api_keys else "no API key"
    page = f"{url}/" if context.config.enable_page else "off"
    return "\n".join(
        (
            f"tellin serves {', '.join(context.model_names)} at {url}/v1 ({keys})",
            f"  page     {page}",
            f"  model    {model.architecture}, context {model.max_model_len} tokens",
            f"  compute  {ready.num_threads} threads, {ready.isa}",
            f"  memory   KV pool of {num_tokens} tokens in {ready.num_kv_blocks} blocks",
        )
    )


def _log_to_stderr(level: int) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("tellin", "uvicorn"):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(level if name == "tellin" else logging.WARNING)
