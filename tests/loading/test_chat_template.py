"""Chat templates: rendering, the sandbox, and failures that are the request's (P45)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tellin.exceptions import InvalidParameterError, RequestError, UnsupportedFeatureError
from tellin.loading import template_sandbox
from tellin.loading.chat_template import ChatTemplate, choose_template
from tellin.loading.templates import templates_from_folder
from tellin.loading.tokenizer import load_tokenizer
from tests.loading.vocabularies import byte_level, tokenizer

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
USER = {"role": "user", "content": "hi"}
OPEN = {"role": "assistant", "content": "Once upon "}


def render(text: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    return ChatTemplate(text).render([USER] if messages is None else messages, **options)


def test_smollm2_prompt_is_the_original(smollm2_path: Path) -> None:
    prompt = load_tokenizer(smollm2_path).apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}]
    )
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_generation_prompt() -> None:
    assert render(CHATML) == "<|user|>hi<|end|>\n<|assistant|>"
    assert render(CHATML, add_generation_prompt=False) == "<|user|>hi<|end|>\n"


def test_continue_final_message() -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(CHATML, [USER, OPEN], **options) == ("<|user|>hi<|end|>\n<|assistant|>Once upon ")
    trimming = CHATML.replace("m.content", "m.content | trim")
    assert render(trimming, [USER, OPEN], **options) == (
        "<|user|>hi<|end|>\n<|assistant|>Once upon"
    )
    padding = CHATML.replace("{{ m.content }}", "{{ ' ' + m.content | trim + ' ' }}")
    assert render(padding, [USER, OPEN], **options).endswith("<|assistant|> Once upon")


def test_continue_final_message_with_parts() -> None:
    template = (
        "{% for m in messages %}[{% for p in m.content %}{{ p.text }}{% endfor %}]{% endfor %}"
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(template, [{"role": "assistant", "content": parts}], **options) == "[ab"
    assert parts[1]["text"] == "b", "the caller's messages must not change"


@pytest.mark.parametrize(
    ("template", "messages", "generation_prompt", "message"),
    [
        (CHATML, [OPEN], True, "exclude each other"),
        (CHATML, [], False, "at least one message"),
        (CHATML, [{"role": "assistant", "content": None}], False, "last message with text"),
        ("nothing", [OPEN], False, "does not show the last message"),
    ],
)
def test_continue_final_message_refused(
    template: str, messages: list[dict[str, Any]], generation_prompt: bool, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        render(
            template,
            messages,
            add_generation_prompt=generation_prompt,
            continue_final_message=True,
        )


def test_environment_is_the_usual_one() -> None:
    assert render("{% if true %}\n  x\n  {% endif %}\ny") == "  x\ny"
    assert (
        render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "1"
    )
    assert render("{{ {'a': '<é&\"'} | tojson }}") == '{"a": "<é&\\""}'
    assert render("{{ [1, {'b': 2}] | tojson(indent=2) }}") == '[\n  1,\n  {\n    "b": 2\n  }\n]'
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{{ '<b>' }}{% generation %}text{% endgeneration %}") == "<b>text"
    assert render("{{ documents is none }}{{ tools is none }}{{ undefined_name }}") == "TrueTrue"


def test_tools_and_variables() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    text = "{{ tools[0].function.name }} {{ enable_thinking }} {{ messages | length }}"
    assert render(text, tools=tools, variables={"enable_thinking": False}) == "f False 1"


@pytest.mark.parametrize(
    "roles",
    [("system", "user", "system"), ("user", "user"), ("martian",)],
)
def test_refusal_carries_the_templates_words(roles: tuple[str, ...]) -> None:
    """P45"""
    strict = (
        "{% for m in messages %}{% if m.role != ['user', 'assistant'][loop.index0 % 2] %}"
        "{{ raise_exception('Roles must alternate, found ' + m.role) }}{% endif %}{% endfor %}"
    )
    messages = [{"role": role, "content": "x"} for role in roles]
    with pytest.raises(RequestError, match="refused the conversation: Roles must alternate, found"):
        render(strict, messages)


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages[0].content + 5 }}",
        "{{ messages[7].content.text }}",
        "{{ 1 // 0 }}",
        "{{ messages[0]['missing']['deeper'] }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% include 'secrets' %}",
        "{{ lipsum(n=1) }}",
    ],
)
def test_failures_are_the_requests(text: str) -> None:
    """P45: whatever a template trips over, it is a request error, and soon."""
    with pytest.raises(RequestError, match="chat template failed"):
        render(text)


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ '{0.__class__}'.format(1) }}",
    ],
)
def test_sandbox_holds(text: str) -> None:
    messages = [dict(USER)]
    assert "<class" not in _render_or_nothing(text, messages)
    assert messages == [USER]


@pytest.mark.parametrize(
    "expression",
    [
        "'x' * 10**10",
        "10**10 * 'x'",
        "[1] * 10**10",
        "3 ** (10**10)",
        "'%1000000000d' % 1",
        "'%*d' % (1000000000, 1)",
        "'%1000000000d' | format(1)",
        "'{:>1000000000}'.format(1)",
        "'x'.center(10**10)",
        "'x'.ljust(width=10**10)",
        "'x' | center(10**10)",
        "'x' | indent(10**10)",
    ],
)
def test_no_huge_value_is_made_of_small_ones(expression: str) -> None:
    with pytest.raises(RequestError):
        render("{{ " + expression + " }}")


SLOW = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "text",
    [
        SLOW,
        "{% set r = range(99999)|list %}{% for i in r %}{% for j in r if false %}{% endfor %}"
        "{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
        "{{ f(50) }}",
        "{% for i in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    ],
)
def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(template_sandbox, "_MAX_SECONDS", 0.1)
    started = time.thread_time()
    with pytest.raises(RequestError, match=r"chat template (refused|failed)"):
        render(text)
    assert time.thread_time() - started < 3


@pytest.mark.parametrize("operation", ["ns.s ~ ns.s", "ns.s + ns.s"])
def test_values_that_double_are_bounded(operation: str) -> None:
    text = "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = OP %}{% endfor %}"
    with pytest.raises(RequestError, match="value of size 134217728 is too large"):
        render(text.replace("OP", operation))


@pytest.mark.parametrize(
    ("start", "operation", "end"),
    [
        ("2**60", "ns.s * ns.s", "1"),  # a product of millions of digits takes minutes
        ("[1]", "[ns.s, ns.s]", "ns.s | tojson"),
        ("{}", "{'a': ns.s, 'b': [ns.s]}", "ns.s | tojson"),
        ("[1]", "[ns.s, ns.s]", "ns.s"),
        ("(1, 2)", "(ns.s, ns.s)", "'%s' % ns.s"),
        ("[1]", "[ns.s] + [ns.s]", "ns.s ~ ''"),
        ("[1]", "[ns.s] * 2", "ns.s == 1"),
    ],
)
def test_work_that_doubles_is_bounded(start: str, operation: str, end: str) -> None:
    text = "{% set ns = namespace(s=START) %}{% for i in range(40) %}{% set ns.s = OP %}"
    text = text.replace("START", start).replace("OP", operation)
    text += "{% endfor %}{{ " + end + " }}"
    started = time.thread_time()
    with pytest.raises(RequestError, match=r"value of size \d+ is too large"):
        render(text)
    assert time.thread_time() - started < 3


LONG = "{% set a = 'a' * 10**6 %}{% set l = range(99999) | list %}"


@pytest.mark.parametrize(
    "expression",
    [
        "a | replace('a', a)",
        "a.replace('', a)",
        "l | join(a)",
        "a.join(a)",
        "range(99999) | map('string') | join(a)",
        "('{0}' * 1000).format(a)",
        "('{0}' * 1000)['format'](a)",
        "('%s' * 1000) | format(a)",
        "('%(x)s' * 1000) % {'x': a}",
        "'{:>1000000000}'['format'](1)",
        "('\\t' * 10**6).expandtabs(10**6)",
        "('\\n' * 10**6) | indent(10**6)",
        "a.translate({97: a})",
        "a | wordwrap(1, wrapstring=a)",
        "'{:>{}}'.format('a', 10**10)",
        "'{:>{w}}'.format_map({'w': 10**10})",
        "'%1.*d' % (10**9, 1)",
        "'%(x)1000000000d' % {'x': 1}",
        "('%999999d' * 1000) % l[:1000]",
        "a | replace(new=a, old='')",
        "[a] | replace('a', a)",
        "a.encode().replace(''.encode(), a.encode())",
        "(['ab'] * 100000) | join(attribute=0, d=a)",
        "a.join(range(99999) | map('string'))",
        "('\\n' * 100000) | indent(first=true, blank=true, width=1000000)",
        "('\\r' * 100000) | indent(blank=true, width=1000000)",
        "'a' | center(width=10**10)",
        "'a'.rjust(10**10)",
        "l | batch(fill_with=0, linecount=10**9) | list",
        "l | slice(fill_with=0, slices=10**9) | list",
        "1 | round(method='ceil', precision=10**8)",
        "(a | replace('a', '\\0')).translate([a])",
        "(1).to_bytes(10**10, 'big')",
        "[1] | tojson(indent=10**7)",
        "a.rfind('b' + a)",
        "a | trim('b' + a)",
        "l | batch(1) | list | sum(start=[])",
        "1 | round(-10**9)",
        "l | slice(10**7) | list | length",
        "(2 ** 60000) // (2 ** 30000 + 1)",
        "namespace(a=1)",
    ],
)
def test_filters_and_methods_are_bounded(expression: str) -> None:
    started = time.thread_time()
    with pytest.raises(RequestError, match=r"refused the conversation: .*(too large|no text)"):
        render(LONG + "{{ " + expression + " }}")
    assert time.thread_time() - started < 3


@pytest.mark.parametrize(
    "text",
    [
        "{% set x %}{% for i in l %}{{ a }}{% endfor %}{% endset %}",
        "{% set x %}{% for i in l %}" + "text " * 10_000 + "{% endfor %}{% endset %}",
        "{% macro m() %}{{ a }}{% endmacro %}{% set x %}{% for i in l %}{{ m() }}{% endfor %}"
        "{% endset %}",
        "{% set ns = namespace(l=[]) %}{% for i in l %}{% set ns.l = [a * 3 ~ i] %}{% endfor %}",
        "{% set ns = namespace(l=[]) %}{% for i in l %}{% set ns.l = ns.l + [a] %}{% endfor %}",
    ],
)
def test_memory_is_bounded_in_sum(text: str) -> None:
    with pytest.raises(RequestError, match=r"makes values of more than|is too large"):
        render(LONG + text)


def test_long_conversations_render() -> None:
    """What the bounds cost: text that grows message by message, and filters over all of them."""
    messages = [{"role": "user", "content": "some words " * 30}] * 2000
    text = "{% set ns = namespace(text='', seen=[]) %}{% for m in messages %}"
    text += "{% set ns.text = ns.text ~ m.content | trim %}{% set ns.seen = ns.seen + [m.role] %}"
    text += "{% if loop.index == messages | length %}{{ ns.text }}{{ ns.seen | length }}{% endif %}"
    started = time.thread_time()
    rendered = render(text + "{% endfor %}", messages)
    assert rendered == ("some words " * 30).strip() * 2000 + "2000"
    assert time.thread_time() - started < 3


def test_concatenation_takes_everything() -> None:
    text = "{{ 'a' ~ 1 ~ none ~ missing ~ [2] }}{% for m in messages %}{{ loop.index ~ ';' }}"
    assert render(text + "{% else %}none{% endfor %}") == "a1None[2]1;"
    assert render(text + "{% else %}none{% endfor %}", []) == "a1None[2]none"


def test_usual_sizes_pass_the_guard() -> None:
    text = "{{ 'a' * 3 }}{{ 2 * 3 }}{{ 7 % 3 }}{{ '%03d' % 7 }}{{ 'x'.center(3) }}{{ 2**10 }}"
    text += "{{ '{:>3}'.format(1) }}{{ '%s' | format('q') }}{{ 'x' | center(3) }}"
    assert render(text) == "aaa61007 x 1024  1q x "
    text = "{{ [{'ts': 1800000000}] | selectattr('ts', 'gt', 1700000000) | list | length }}"
    text += "{{ missing | default(10**12) }}{{ [1] | sum(start=10**9) }}{{ 'abc' | join('-') }}"
    text += "{{ '(%(a)s)* {b}' % {'a': 1} }}{{ 'a a' | replace(new='b', old='a', count=1) }}"
    text += "{{ 'x\\ny' | indent(first=true, width=1) }}{{ '{:*>3}'.format(1) }}"
    assert render(text) == "110000000000001000000001a-b-c(1)* {b}b a x\n y**1"
    text = "{{ messages[0].content.split('|')[0].lstrip() }}"
    message = {"role": "user", "content": "at: 12345678* %12345678d|x"}
    assert render(text, [message]) == "at: 12345678* %12345678d"


def _render_or_nothing(text: str, messages: list[dict[str, Any]]) -> str:
    try:
        return render(text, messages)
    except RequestError:
        return ""


@pytest.mark.parametrize("text", ["{% if %}", "{{ x", "{% endfor %}", "{% unknown %}"])
def test_broken_template(text: str) -> None:
    with pytest.raises(InvalidParameterError, match="not valid Jinja"):
        ChatTemplate(text)


def test_no_template_is_an_error(tmp_path: Path) -> None:
    """P45: no silent default."""
    backend = tokenizer(tmp_path, byte_level())
    with pytest.raises(InvalidParameterError, match="the model has no chat template"):
        backend.apply_chat_template([USER])
    assert backend.apply_chat_template([USER], chat_template=CHATML).startswith("<|user|>hi")


def test_choice_of_templates(tmp_path: Path) -> None:
    both = {"default": "d", "tool_use": "t", "rag": "r"}
    assert choose_template(tmp_path, both, None, False) == "d"
    assert choose_template(tmp_path, both, None, True) == "t"
    assert choose_template(tmp_path, both, "rag", False) == "r"
    assert choose_template(tmp_path, both, "{{ x }}", False) == "{{ x }}"
    with pytest.raises(InvalidParameterError, match="templates named rag"):
        choose_template(tmp_path, {"rag": "r"}, None, False)


def test_special_tokens_and_named_templates_of_gguf(tmp_path: Path) -> None:
    metadata = byte_level(add_bos_token=True) | {
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
        "tokenizer.chat_template.tool_use": "tools",
    }
    backend = tokenizer(tmp_path, metadata)
    prompt = backend.apply_chat_template([USER])
    assert prompt == "<|bos|>hi<|eos|>"
    assert backend.encode(prompt) == backend.encode(prompt, add_special_tokens=False)
    assert backend.apply_chat_template([USER], tools=[]) == "tools"


def test_tools_that_a_template_leaves_out_are_refused(tmp_path: Path) -> None:
    """The model would never see them, and nobody would know."""
    backend = tokenizer(tmp_path, byte_level() | {"tokenizer.chat_template": CHATML})
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(UnsupportedFeatureError, match="the chat template shows the model no tools"):
        backend.apply_chat_template([USER], tools=tools)
    assert backend.apply_chat_template([USER], tools=[]).startswith("<|user|>hi")
    shows = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
    assert backend.apply_chat_template([USER], tools=tools, chat_template=shows) == "f"


def test_templates_of_folders(tmp_path: Path) -> None:
    assert templates_from_folder(tmp_path) == {}
    (tmp_path / "tokenizer_config.json").write_text(
        '{"chat_template": [{"name": "default", "template": "a"},'
        ' {"name": "rag", "template": "b"}]}'
    )
    assert templates_from_folder(tmp_path) == {"default": "a", "rag": "b"}
    (tmp_path / "chat_template.jinja").write_text("c")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("d")
    assert templates_from_folder(tmp_path) == {"default": "c", "rag": "b", "tool_use": "d"}
