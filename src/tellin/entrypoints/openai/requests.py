"""Bodies of requests: OpenAI's parameters and vLLM's extensions, as strict pydantic models.

A name that is not listed is refused by name. Types are strict ("0.5" is no number, NaN is none
either); ranges are checked by `SamplingParams` and the admission gate, so that HTTP and Python
agree. Parameters that OpenAI's service takes and that change nothing here are listed once, in
`Ignored`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from tellin.exceptions import InvalidParameterError


def _of_one_kind(value: Any) -> Any:
    """Say in one sentence what is wrong with a prompt: each kind of list would say why it is not
    that kind."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(f"must be {_KINDS_OF_PROMPTS}, got {value!r:.60}")
    if not value:
        raise ValueError("must not be an empty list")
    kinds = [_KIND_OF_ITEM.get(type(item)) for item in value]
    for index, (item, kind) in enumerate(zip(value, kinds, strict=True)):
        if kind is None:
            raise ValueError(f"must be {_KINDS_OF_PROMPTS}; item {index} is {item!r:.60}")
        if kind != kinds[0]:
            raise ValueError(
                f"must hold items of one kind; item 0 is a {kinds[0]}, item {index} a {kind}: "
                f"{item!r:.60}"
            )
        if kind == "list" and not (item and all(type(token) is int for token in item)):
            raise ValueError(f"item {index} must be a list of token ids, got {item!r:.60}")
    return value


_KINDS_OF_PROMPTS = "a text, a list of texts, a list of token ids, or a list of such lists"
_KIND_OF_ITEM = {str: "text", int: "token id", list: "list"}
TokenIds = Annotated[list[int], Field(min_length=1)]
PromptInput = Annotated[
    str
    | Annotated[list[str], Field(min_length=1)]
    | TokenIds
    | Annotated[list[TokenIds], Field(min_length=1)],
    BeforeValidator(_of_one_kind),
]
MAX_STOP_STRINGS = 64


UNSUPPORTED = {
    "audio": "this server makes text only",
    "beam_width": "beam search is in Python only (LLM.beam_search)",
    "function_call": "it is deprecated; use tool_choice",
    "functions": "it is deprecated; use tools",
    "guided_choice": "use structured_outputs with choice",
    "guided_grammar": "use structured_outputs with grammar",
    "guided_json": "use response_format, or structured_outputs with json",
    "guided_regex": "use structured_outputs with regex",
    "length_penalty": "beam search is in Python only (LLM.beam_search)",
    "logits_processors": "a request cannot bring code; name processors when the engine starts",
    "mm_processor_kwargs": "it is for all requests: give it when the server starts",
    "prompt_embeds": "embeddings are prompts of /v1/completions only",
    "use_beam_search": "beam search is in Python only (LLM.beam_search)",
    "web_search_options": "this server does not search",
}
"""Parameters of OpenAI's or vLLM's that are refused, and why or what to use instead."""


class Body(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=False)


class Ignored(Body):
    """What OpenAI's clients send for OpenAI's own service; accepted, without effect here."""

    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class StreamOptions(Body):
    include_usage: bool = False
    """Send the usage in a last chunk without choices."""
    continuous_usage_stats: bool = False
    """Send the usage so far with every chunk."""
    include_obfuscation: bool = False
    """OpenAI pads chunks against observers of the network; accepted, without effect."""


class JsonSchemaFormat(Body):
    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    """The schema is always enforced, whatever this says."""


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidParameterError(
                "json_schema is needed by type 'json_schema' and by no other",
                parameter="response_format.json_schema",
            )
        return self


class StructuredOutputs(Body):
    """vLLM's way to say a constraint; exactly one of the first six."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


class RepetitionDetection(Body):
    """End an output that repeats a pattern of this many tokens this often."""

    max_pattern_size: int
    min_pattern_size: int = 0
    min_count: int = 0


class GenerationRequest(Ignored):
    """What chat and text completions share."""

    model: str | None = None
    """Name of the served model; None = the only one."""
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    best_of: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int = 0
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """Shown in the answer's id and in the log; ids inside the engine are always unique."""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetection | None = None
    vllm_xargs: dict[str, Any] | None = None
    """For the engine's logits processors: ``SamplingParams.extra_args``."""

    @model_validator(mode="after")
    def _check_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise InvalidParameterError(
                "stream_options is only allowed with stream=true", parameter="stream_options"
            )
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidParameterError(
                "prompt_logprobs cannot be streamed; set stream=false", parameter="prompt_logprobs"
            )
        if self.structured_outputs is not None and self.response_format is not None:
            raise InvalidParameterError(
                "give either response_format or structured_outputs, not both",
                parameter="structured_outputs",
            )
        return self


class FunctionDefinition(Body):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Arguments follow the schema for sure when tool_choice is required or names a function."""


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body):
    name: str


class NamedToolChoice(Body):
    type: Literal["function"]
    function: NamedFunction


class AllowedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(min_length=1)]


class AllowedToolChoice(Body):
    """Some of the request's tools only."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[NamedToolChoice | AllowedToolChoice, Field(discriminator="type")]
)


class ChatCompletionRequest(GenerationRequest):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None
    prediction: dict[str, Any] | None = None
    """A hint to OpenAI's service that changes speed only; without effect here."""

    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    """On top of those that the template writes."""
    continue_final_message: bool = False
    documents: list[dict[str, Any]] | None = None
    """For templates that show documents."""
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool = True

    @model_validator(mode="after")
    def _check_chat(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidParameterError(
                "top_logprobs needs logprobs=true", parameter="top_logprobs"
            )
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise InvalidParameterError(
                "max_tokens (deprecated) and max_completion_tokens contradict",
                parameter="max_tokens",
            )
        if not self.tools and self.tool_choice not in (None, "none", "auto"):
            raise InvalidParameterError("tool_choice needs tools", parameter="tool_choice")
        return self


class CompletionRequest(GenerationRequest):
    prompt: PromptInput | None = None
    prompt_embeds: str | Annotated[list[str], Field(min_length=1)] | None = None
    """Base64 of a .npy or safetensors file, or several; their choices come before the prompts'."""
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = False
    suffix: str | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_prompt(self) -> CompletionRequest:
        if self.prompt is None and self.prompt_embeds is None:
            raise InvalidParameterError("prompt is missing; it is required", parameter="prompt")
        if self.prompt_embeds is not None and self.echo:
            raise InvalidParameterError(
                "echo shows the prompt's text, and prompt_embeds have none; set echo=false",
                parameter="echo",
            )
        return self


class EmbeddingRequest(Ignored):
    input: PromptInput
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool = True


class ClassificationRequest(Ignored):
    input: PromptInput
    model: str | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool = True
    use_activation: bool | None = Field(
        default=None, validation_alias=AliasChoices("use_activation", "activation", "softmax")
    )
    """False: logits instead of probabilities; under vLLM's newer or older names."""


Texts = str | Annotated[list[str], Field(min_length=1)]


class ScoreRequest(Ignored):
    """Texts to compare, pair by pair; under vLLM's older or newer names."""

    model: str | None = None
    text_1: Texts = Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))
    text_2: Texts = Field(validation_alias=AliasChoices("text_2", "documents", "items", "data_2"))
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool = True


class Document(Body):
    text: str


class RerankRequest(Ignored):
    model: str | None = None
    query: str
    documents: Annotated[list[str | Document], Field(min_length=1)]
    top_n: Annotated[int, Field(ge=0)] | None = None
    """How many of the best to return; None and 0 = all."""
    return_documents: bool = True
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool = True


class LoadAdapterRequest(Body):
    lora_name: str
    lora_path: str
    """A folder on the server's machine."""
    load_inplace: bool = False
    """Replace the adapter of that name."""


class UnloadAdapterRequest(Body):
    lora_name: str
    lora_int_id: int | None = None


class TokenizeRequest(Body):
    """Either a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    """Default: yes for a prompt, no for a conversation, whose template writes them."""
    parse_special: bool = True
    """Whether control tokens written out in a prompt become these tokens."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidParameterError("give either prompt or messages", parameter="prompt")
        return self


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], Field(max_length=1 << 22)]
