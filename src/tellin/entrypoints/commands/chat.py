"""``tellin chat``: a conversation in the terminal, or with piped standard input.

Ctrl-C stops the answer, not the program; what was answered so far stays in the conversation. The
thoughts of a model that marks them go to standard error, and do not stay.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from tellin.entrypoints.commands.common import (
    DEFAULT_TEMPERATURE,
    add_image_argument,
    add_model_arguments,
    add_sampling_arguments,
    interruptible,
    open_llm,
    read_images,
    sampling_params,
    user_message,
)
from tellin.entrypoints.openai.parsers.events import ParsedDelta
from tellin.entrypoints.openai.parsers.harmony import HarmonyParser
from tellin.entrypoints.openai.parsers.message import AnswerParser, MessageParser
from tellin.entrypoints.openai.parsers.reasoning import CLOSING, OPENING, ThinkParser
from tellin.entrypoints.openai.parsers.registry import (
    answer_marks,
    template_is_harmony,
    thought_marks,
)
from tellin.exceptions import ContextLengthError, InvalidParameterError, UnsupportedFeatureError

if TYPE_CHECKING:
    from tellin.entrypoints.llm import LLM
    from tellin.sampling_params import SamplingParams

DESCRIPTION = """\
Talk to a model. Ctrl-C stops an answer, Ctrl-D or /exit ends the program. Without a terminal each
line of standard input is one message, and the answers are printed."""

EXAMPLES = """\
examples:
  tellin chat
  tellin chat --model gemma3-270m --system "You are a pirate."
  printf 'Hello!\\nWhat did I say?\\n' | tellin chat

commands in the chat:
  /reset   forget the conversation      /retry   answer again      /exit   leave
  \"\"\"      begin and end a message of several lines
  /image FILE   a picture for the next message (repeatable; the model must see images)
"""

HELP = (
    "commands: /reset  /retry  /image FILE  /exit  /help; "
    '""" begins and ends a message of several lines'
)
FENCE = '"""'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_image_argument(parser, "the first message")
    parser.add_argument("--stats", action="store_true", help="print tokens per second to stderr")
    add_model_arguments(parser)
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Talk until the input ends."""
    images = read_images(args.image)
    with open_llm(args) as llm:
        if llm.model_config.chat_template is None:
            raise InvalidParameterError(
                "this model has no chat template; use 'tellin generate'", parameter="--model"
            )
        params = sampling_params(args, llm, temperature=DEFAULT_TEMPERATURE, max_tokens=None)
        conversation = Conversation(llm, params, args.system, show_stats=args.stats)
        conversation.images = images
        if sys.stdin.isatty():
            _talk(conversation)
        else:
            for line in sys.stdin:
                if line.strip():
                    conversation.say(line.rstrip("\n"))
    return 0


class Conversation:
    """The messages so far, and how to answer the next one."""

    def __init__(
        self, llm: LLM, params: SamplingParams, system: str | None, *, show_stats: bool = False
    ) -> None:
        self._llm = llm
        self._params = params
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self._show_stats = show_stats
        template = llm.model_config.chat_template or ""
        self._has_channels = template_is_harmony(template)
        self._marks = thought_marks(template)
        self._answer_marks = answer_marks(template)
        # All marks but those that most models have are special tokens.
        if self._has_channels or self._marks not in (None, (OPENING, CLOSING)):
            self._params = params.clone()
            self._params.skip_special_tokens = False
        self.messages: list[dict[str, Any]] = list(self._start)
        self.images: list[bytes] = []
        """Pictures that go with the next message."""

    def reset(self) -> None:
        """Forget all but the system message."""
        self.messages = list(self._start)
        self.images = []

    def say(self, text: str) -> None:
        """Add the user's message and print the answer. A message that does not fit is not kept."""
        images, self.images = self.images, []
        self.messages.append(user_message(text, images))
        try:
            self.answer()
        except Exception:
            self.messages.pop()
            raise

    def retry(self) -> None:
        """Answer the last message again."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if self.messages and self.messages[-1]["role"] == "user":
            self.answer()

    def answer(self) -> None:
        """Print the model's next message as it is written, and keep it."""
        pieces: list[str] = []
        parser: AnswerParser = MessageParser(None, None)
        num_tokens = 0
        start = first = time.monotonic()
        stream = self._llm.stream(self.messages, self._params)
        try:
            with interruptible(stream):
                for output in stream:
                    if not num_tokens:
                        first = time.monotonic()
                        parser = self._make_parser(output.prompt or "")
                    num_tokens += len(output.outputs[0].token_ids)
                    pieces.append(_show(parser.feed(output.text)))
        except KeyboardInterrupt:
            print(" [stopped]", end="", file=sys.stderr, flush=True)
        pieces.append(_show(parser.finish()))
        print(flush=True)
        self.messages.append({"role": "assistant", "content": "".join(pieces)})
        if self._show_stats and num_tokens > 1:
            seconds = max(time.monotonic() - first, 1e-9)
            print(
                f"[{num_tokens} tokens, first after {first - start:.2f} s, "
                f"then {(num_tokens - 1) / seconds:.1f} tokens/s]",
                file=sys.stderr,
            )

    def _make_parser(self, prompt: str) -> AnswerParser:
        """Parts the thoughts of an answer to ``prompt`` from what it says."""
        if self._has_channels:
            return HarmonyParser()
        if self._marks is None:
            return MessageParser(None, None)
        opening, closing = self._marks
        starts_inside = prompt.rstrip().endswith(opening)
        think = ThinkParser(starts_inside, opening=opening, closing=closing)
        return MessageParser(think, None, answer_marks=self._answer_marks)


def _show(delta: ParsedDelta) -> str:
    """Print a piece of an answer; returns what of it is content."""
    if delta.reasoning:
        print(delta.reasoning, end="", file=sys.stderr, flush=True)
        if delta.content:
            print(file=sys.stderr, flush=True)
    if delta.content:
        print(delta.content, end="", flush=True)
    return delta.content


def _talk(conversation: Conversation) -> None:
    """The loop at a terminal."""
    try:
        import readline  # noqa: F401  (editing and history of input)
    except ImportError:
        pass
    print(HELP, file=sys.stderr)
    while True:
        try:
            text = _read_message()
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print("  (Ctrl-D or /exit to leave)", file=sys.stderr)
            continue
        if text in ("/exit", "/quit", "/bye"):
            return
        try:
            _obey(conversation, text)
        except (ContextLengthError, InvalidParameterError, UnsupportedFeatureError) as error:
            print(f"{error} (/reset forgets the conversation)", file=sys.stderr)


def _obey(conversation: Conversation, text: str) -> None:
    if text == "/reset":
        conversation.reset()
        print("forgotten", file=sys.stderr)
    elif text == "/retry":
        conversation.retry()
    elif text.startswith("/image "):
        names = text.removeprefix("/image ").strip()
        conversation.images += read_images([names])
        print(f"{len(conversation.images)} for the next message", file=sys.stderr)
    elif text.startswith("/"):
        print(HELP, file=sys.stderr)
    elif text.strip():
        conversation.say(text)


def _read_message() -> str:
    line = input("> ")
    if not line.startswith(FENCE):
        return line
    lines = [line.removeprefix(FENCE)]
    while not lines[-1].endswith(FENCE):
        lines.append(input(". "))
    lines[-1] = lines[-1].removesuffix(FENCE)
    return "\n".join(lines).strip("\n")
