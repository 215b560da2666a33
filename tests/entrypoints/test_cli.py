"""The command line as a Unix user meets it: exit codes, streams, messages, Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tellin.config import EngineArgs
from tellin.entrypoints import cli
from tellin.entrypoints.commands import chat, common, generate, serve
from tellin.entrypoints.llm import LLM
from tellin.protocol import EngineCoreRequest
from tests.engine.fakes import EngineMaker, FakeClient, text_ids

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"


def answer(request: EngineCoreRequest) -> list[list[int]]:
    """Says how long the prompt is, in letters."""
    return [text_ids(char) for char in f"n{len(request.prompt_token_ids or ())}"]


@pytest.fixture
def model(make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch) -> EngineMaker:
    """``tellin`` commands open an engine over a scripted core."""

    def open_llm(args: Any) -> LLM:
        return LLM.from_engine(make_engine(answer, chat_template=TEMPLATE))

    for module in (generate, chat, common):
        monkeypatch.setattr(module, "open_llm", open_llm)
    return make_engine


def tellin(*arguments: str) -> int:
    return cli.main(list(arguments))


# ---------------------------------------------------------------------- usage


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert tellin("--version") == 0
    assert capsys.readouterr().out.startswith("tellin ")


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in cli.COMMANDS)])
def test_help_shows_examples(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert tellin(*arguments) == 0
    captured = capsys.readouterr()
    assert "examples:" in captured.out
    assert captured.err == ""


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["generate", "--nonsense", "x"],
        ["generate", "--max-tokens", "many", "x"],
        ["generate", "--set", "no-equals-sign", "x"],
        ["generate", "--set", "no_such_argument=1", "-m", "./missing.gguf", "x"],
        ["generate", "--set", f"seed={'9' * 5000}", "-m", "./missing.gguf", "x"],
        ["generate", "--set", f"seed={'[' * 50_000}", "-m", "./missing.gguf", "x"],
        ["plan"],
    ],
)
def test_wrong_usage_is_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    expected = cli.EXIT_ERROR if "./missing.gguf" in arguments else cli.EXIT_USAGE
    assert tellin(*arguments) == expected
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("command", ["generate", "chat", "plan"])
def test_errors_are_one_line(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("x"))
    model = ["./missing.gguf"] if command == "plan" else ["-m", "./missing.gguf"]
    assert tellin(command, *model) == cli.EXIT_ERROR
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert captured.err.startswith(f"tellin {command}: error: ")
    assert "missing.gguf" in captured.err


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("serve", "--model", "m"), "the model is given without --model"),
        (("generate", "--max_model_len=64", "x"), "it is written --max-model-len"),
        (("serve", "m", "--quantization", "awq"), "--quantization is not supported: leave it out"),
        (("serve", "m", "--enable-auto-tool-choice"), "tools work as they are"),
        (("serve", "m", "--served-model-name", "a", "b"), "is written once for each"),
    ],
)
def test_engine_arguments_that_are_no_options_are_explained(
    arguments: tuple[str, ...], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tellin(*arguments) == cli.EXIT_USAGE
    assert hint in capsys.readouterr().err


def test_engine_arguments_are_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command line of vLLM's, and what it means here."""
    seen: list[Any] = []
    monkeypatch.setattr(serve, "run", lambda args: seen.append(args) or 0)
    assert tellin(
        "serve", "--max-num-seqs", "4", "--no-enable-prefix-caching", "m", "--max-model-len", "64",
        "--gpu-memory-utilization=0.5", "--enforce-eager", "--set", "block_size=32",
        "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}',
    ) == 0  # fmt: skip
    [args] = seen
    assert (args.model, args.max_model_len) == ("m", 64)
    assert dict(map(common.parse_assignment, args.set)) == {
        "max_num_seqs": 4,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.5,
        "block_size": 32,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4},
    }
    EngineArgs.from_dict({"model": "m", **dict(map(common.parse_assignment, args.set))})
    assert capsys.readouterr().err == "note: --enforce-eager has no effect here\n"
    assert tellin("serve", "m", "--max-num-seqs") == cli.EXIT_USAGE
    assert "--max-num-seqs: expected one argument" in capsys.readouterr().err
    seen.clear()
    assert tellin("serve", "m") == 0
    assert seen[0].set == [], "nothing is left from the run before"


@pytest.mark.parametrize("arguments", [("serve", "m", "--nonsense"), ("models", "--max-num-seqs")])
def test_other_options_are_not(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert tellin(*arguments) == cli.EXIT_USAGE
    assert capsys.readouterr().err.endswith(f"unrecognized arguments: {arguments[-1]}\n")


def test_bad_parameter_is_a_usage_error(
    model: EngineMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tellin("generate", "--temperature", "5", "x") == cli.EXIT_USAGE
    assert "temperature must be in [0, 2]" in capsys.readouterr().err
    assert model.client.is_closed


# ---------------------------------------------------------------------- generate


def test_generate_streams_to_stdout(model: EngineMaker, capsys: pytest.CaptureFixture[str]) -> None:
    assert tellin("generate", "hi") == 0
    assert capsys.readouterr().out == "n5\n", "u:hi; has five characters"
    assert tellin("generate", "--raw", "hi") == 0
    assert capsys.readouterr().out == "n2\n"
    assert tellin("generate", "--system", "s", "hi") == 0
    assert capsys.readouterr().out == "n9\n"
    sent = model.client.requests[0].sampling_params
    assert sent is not None
    assert sent.temperature == 0.0


def test_generate_several(model: EngineMaker, capsys: pytest.CaptureFixture[str]) -> None:
    assert tellin("generate", "--raw", "a", "bb") == 0
    assert capsys.readouterr().out == "n1\n---\nn2\n"
    assert tellin("generate", "--raw", "--count", "2", "--json", "a") == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["index"] for record in records] == [0, 1]
    assert records[0]["text"] == "n1"
    assert records[0]["finish_reason"] == "length"
    assert (records[0]["num_prompt_tokens"], records[0]["num_completion_tokens"]) == (1, 2)


def test_bytes_that_are_no_text_are_one_line(
    model: EngineMaker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the locale is UTF-8, Python would refuse them with a traceback."""
    stream = io.TextIOWrapper(io.BytesIO(b"a\xffb"), encoding="utf-8", errors="strict")
    monkeypatch.setattr("sys.stdin", stream)
    assert tellin("generate") == cli.EXIT_USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert "UTF-8" in line


def test_a_terminal_is_told_that_it_is_waited_for(
    model: EngineMaker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = io.StringIO("abc\n")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    assert tellin("generate", "--raw") == 0
    assert capsys.readouterr() == (
        "n3\n",
        "reading standard input; Ctrl-D on a line of its own ends it\n",
    )


def test_generate_reads_stdin(
    model: EngineMaker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("abc\n"))
    assert tellin("generate", "--raw") == 0
    assert capsys.readouterr().out == "n3\n"
    assert tellin("generate", "--raw", "-", "-") == cli.EXIT_USAGE
    assert tellin("generate", "--raw", "--system", "s", "x") == cli.EXIT_USAGE


def test_sampling_options_reach_the_request(model: EngineMaker) -> None:
    options = ["-n", "9", "-t", "0.5", "--top-p", "0.8", "--top-k", "3", "--min-p", "0.1"]
    options += ["--seed", "7", "--stop", "A", "--stop", "B", "--repetition-penalty", "1.1"]
    assert tellin("generate", *options, "x") == 0
    sent = model.client.requests[0].sampling_params
    assert sent is not None
    assert (sent.max_tokens, sent.temperature, sent.top_p, sent.top_k) == (9, 0.5, 0.8, 3)
    assert (sent.min_p, sent.seed, sent.stop, sent.repetition_penalty) == (0.1, 7, ["A", "B"], 1.1)


def test_engine_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    assert common.parse_assignment("max_num_seqs=4") == ("max_num_seqs", 4)
    assert common.parse_assignment("kv-cache-dtype=int8") == ("kv_cache_dtype", "int8")
    assert common.parse_assignment('speculative_config={"method": "ngram"}') == (
        "speculative_config",
        {"method": "ngram"},
    )
    assert common.parse_assignment("enable_prefix_caching=False")[1] is False
    seen: dict[str, Any] = {}
    monkeypatch.setattr("tellin.entrypoints.llm.LLM", lambda path, **kwargs: seen.update(kwargs))
    monkeypatch.setattr("tellin.loading.resolve_model", lambda *a, **k: Path("m"), raising=False)
    monkeypatch.setattr(generate, "open_llm", common.open_llm)
    with pytest.raises(TypeError):  # what was opened is not an LLM
        tellin("generate", "--threads", "2", "--set", "max_num_seqs=4", "x")
    assert (seen["num_threads"], seen["max_num_seqs"], seen["max_model_len"]) == (2, 4, None)


# ---------------------------------------------------------------------- chat


def converse(monkeypatch: pytest.MonkeyPatch, lines: list[Any], *arguments: str) -> int:
    """At a terminal: each item is a line, or an exception that input() raises."""
    items = iter([*lines, EOFError()])

    def fake_input(prompt: str) -> str:
        item = next(items)
        if isinstance(item, BaseException):
            raise item
        return str(item)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("builtins.input", fake_input)
    monkeypatch.setattr("sys.stdin", Terminal())
    return tellin("chat", *arguments)


def test_chat_keeps_the_conversation(
    model: EngineMaker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["a", "bb", "/retry", "/reset", "a", "", "/help", "/exit", "never"]
    assert converse(monkeypatch, lines) == 0
    # u:a; = 4, then u:a;a:n4;u:bb; = 14, again, and 4 after the reset
    assert capsys.readouterr().out.split() == ["n4", "n14", "n14", "n4"]


def test_chat_system_message_survives_reset(
    model: EngineMaker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert converse(monkeypatch, ["a", "/reset", "a"], "--system", "S") == 0
    assert capsys.readouterr().out.split() == ["n8", "n8"]


def test_chat_several_lines(
    model: EngineMaker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert converse(monkeypatch, ['"""a', 'b"""', '"""c"""']) == 0
    assert capsys.readouterr().out.split()[0] == "n6"
    prompts = [request.prompt_token_ids for request in model.client.requests]
    assert prompts[0] == text_ids("u:a\nb;")


def test_chat_ctrl_c_at_the_prompt_goes_on(
    model: EngineMaker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert converse(monkeypatch, [KeyboardInterrupt(), "a"]) == 0
    assert capsys.readouterr().out.split() == ["n4"]


def test_chat_ctrl_c_stops_the_answer_only(
    make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real SIGINT in the middle of an answer: it ends after the step, the next message works."""

    class Client(FakeClient):
        def get_output(self, timeout: float | None = None) -> Any:
            if self.names().count("get_output") == 1:
                os.kill(os.getpid(), signal.SIGINT)
            return super().get_output(timeout)

    def script(request: EngineCoreRequest) -> list[list[int]]:
        return [text_ids(char) for char in "abcdefgh"]

    monkeypatch.setattr(
        chat,
        "open_llm",
        lambda args: LLM.from_engine(
            make_engine(script, chat_template=TEMPLATE, client_class=Client)
        ),
    )
    before = signal.getsignal(signal.SIGINT)
    assert converse(monkeypatch, ["x", "y"]) == 0
    captured = capsys.readouterr()
    assert captured.out.split() == ["a", "abcdefgh"]
    assert "[stopped]" in captured.err
    assert signal.getsignal(signal.SIGINT) is before
    assert make_engine.client.live == {}
    assert make_engine.client.requests[1].prompt_token_ids == text_ids("u:x;a:a;u:y;")


def test_chat_too_long_says_what_to_do(
    model: EngineMaker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert converse(monkeypatch, ["x" * 100, "a"]) == 0
    captured = capsys.readouterr()
    assert "/reset" in captured.err
    assert captured.out.split() == ["n4"], "the message that did not fit is forgotten"


def test_chat_piped_input(
    model: EngineMaker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n\nbb\n"))
    assert tellin("chat", "--stats") == 0
    captured = capsys.readouterr()
    assert captured.out.split() == ["n4", "n14"]
    assert captured.err.count("tokens/s") == 2


def test_chat_parts_channels(
    make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """gpt-oss: thoughts go to standard error, the conversation keeps the answer alone."""
    said = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes"

    def script(request: EngineCoreRequest) -> list[list[int]]:
        return [text_ids(char) for char in said]

    template = TEMPLATE + "{# <|channel|> <|message|> #}"
    maker = make_engine
    monkeypatch.setattr(
        chat, "open_llm", lambda args: LLM.from_engine(maker(script, chat_template=template))
    )
    assert converse(monkeypatch, ["x", "y"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "yes\nyes\n"
    assert captured.err.count("hm") == 2
    assert "channel" not in captured.out + captured.err
    assert maker.client.requests[1].prompt_token_ids == text_ids("u:x;a:yes;u:y;")
    assert maker.client.requests[0].sampling_params.skip_special_tokens is False


@pytest.mark.parametrize("opening", ["", "<think>\n"])
def test_chat_parts_thoughts(
    opening: str,
    make_engine: EngineMaker,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whether the prompt opens them (Qwen3.5) or the model does (Qwen3)."""
    said = f"{'' if opening else '<think>'}hm</think>\n\nyes"

    def script(request: EngineCoreRequest) -> list[list[int]]:
        return [text_ids(char) for char in said]

    template = TEMPLATE + "{# <think> #}" + opening.replace("\n", "{{ '\\n' }}")
    maker = make_engine
    monkeypatch.setattr(
        chat, "open_llm", lambda args: LLM.from_engine(maker(script, chat_template=template))
    )
    assert converse(monkeypatch, ["x", "y"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "yes\nyes\n"
    assert captured.err.count("hm") == 2
    assert "think" not in captured.out + captured.err
    assert maker.client.requests[1].prompt_token_ids == text_ids(f"u:x;a:yes;u:y;{opening}")


def test_chat_needs_a_template(
    make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chat, "open_llm", lambda args: LLM.from_engine(make_engine(answer)))
    assert tellin("chat") == cli.EXIT_USAGE
    assert "chat template" in capsys.readouterr().err


# ---------------------------------------------------------------------- store


def test_models_and_pull(tellin_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tellin("models") == 0
    assert "smollm2" in capsys.readouterr().out
    assert tellin("models", "--json") == 0
    records = json.loads(capsys.readouterr().out)
    assert {record["name"]: record["is_pulled"] for record in records}["smollm2"] is False
    assert tellin("pull", "no such model") == cli.EXIT_ERROR
    captured = capsys.readouterr()
    assert "no such model" in captured.err
    assert captured.out == ""


# ---------------------------------------------------------------------- as a process


def test_the_package_is_the_command_too() -> None:
    command = [sys.executable, "-m", "tellin", "generate", "--nonsense"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == cli.EXIT_USAGE
    assert "\ntellin generate: error: unrecognized" in done.stderr


def test_broken_pipe_is_quiet() -> None:
    """``tellin models | head -0``: no traceback, the shell's usual exit code."""
    command = [sys.executable, "-m", "tellin.entrypoints.cli", "models"]
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write_end)
    assert done.returncode == cli.EXIT_BROKEN_PIPE
    assert done.stderr == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is full")
def test_a_full_disk_is_one_line() -> None:
    command = [sys.executable, "-m", "tellin.entrypoints.cli", "models"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == cli.EXIT_ERROR
    assert done.stderr == "tellin: error: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("stream", ["stdin", "stdout", "stderr"])
def test_closed_streams_are_no_error(
    model: EngineMaker, monkeypatch: pytest.MonkeyPatch, stream: str
) -> None:
    """``tellin generate - <&-`` and the like: Python sets such streams to None."""
    monkeypatch.setattr(sys, stream, None)
    code = tellin("generate", "-" if stream == "stdin" else "hi")
    getattr(sys, stream).close()  # what took its place
    assert code == cli.EXIT_OK


def test_interrupt_while_loading_is_130() -> None:
    code = (
        "import sys\nfrom tellin.entrypoints import cli\n"
        "from tellin.entrypoints.commands import generate\n"
        "def open_llm(args): raise KeyboardInterrupt\n"
        "generate.open_llm = open_llm\nsys.exit(cli.main(['generate', 'x']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == cli.EXIT_INTERRUPTED
    assert "Traceback" not in done.stderr
