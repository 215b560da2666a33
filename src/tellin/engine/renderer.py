"""From what a user writes to token ids: tokenisation and chat templates.

Owns the tokenizer's use and the frontend's multimodal cache. Does not judge whether a prompt can be
served: that is the input processor's job, except for texts so long that tokenising them would be an
attack.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from tellin.checks import check_bool, check_str
from tellin.config import EngineConfig
from tellin.engine.chat_messages import (
    ContentFormats,
    Conversation,
    check_messages,
    has_image_parts,
)
from tellin.engine.control_checks import check_mapping
from tellin.engine.mm_inputs import holds_images
from tellin.engine.pairs import TextPair, encode_pair
from tellin.engine.prompt_embeds import prompt_rows
from tellin.engine.prompts import (
    CHAT_TOKENIZE_PARAMS,
    COMPLETION_TOKENIZE_PARAMS,
    POOLING_TOKENIZE_PARAMS,
    ParsedPrompt,
    RenderedPrompt,
    TokenizeParams,
    is_rendered,
    parse_prompt,
)
from tellin.engine.token_table import TokenizerLike
from tellin.engine.truncation import special_ends, truncate, truncation_limit
from tellin.exceptions import (
    ContextLengthError,
    InvalidParameterError,
    InvalidTypeError,
    UnsupportedFeatureError,
)
from tellin.protocol import CacheStats

if TYPE_CHECKING:
    from tellin.engine.mm_processor import MultiModalProcessor

logger = logging.getLogger("tellin.engine")


class ChatTokenizer(TokenizerLike, Protocol):
    """The tokenizer as the shell uses it."""

    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def chat_templates(self) -> Mapping[str, str]: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]: ...
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str: ...


INLINE_CHARS = 1024
"""Texts up to this long are tokenised at once: in less time than handing them to a thread takes,
or not much more."""

_TEMPLATE_ARGUMENTS = frozenset(
    {
        "self",
        "messages",
        "add_generation_prompt",
        "continue_final_message",
        "tools",
        "chat_template",
    }
)


@dataclass(frozen=True)
class ChatParams:
    """How to turn a conversation into a prompt."""

    chat_template: str | None = None
    """Jinja text; None = the engine's, else the model's."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """Leave the last message open, for the model to continue; excludes the generation prompt."""
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    content_format: str = "auto"
    """string = join text parts of a message; openai = hand parts to the template; auto = what the
    template reads."""

    def __post_init__(self) -> None:
        if self.chat_template is not None and not check_str("chat_template", self.chat_template):
            raise InvalidParameterError(
                "chat_template must not be empty; leave it out for the model's own",
                parameter="chat_template",
                value="",
            )
        check_bool("add_generation_prompt", self.add_generation_prompt)
        check_bool("continue_final_message", self.continue_final_message)
        if self.tools is not None and not (
            isinstance(self.tools, list | tuple)
            and all(isinstance(tool, Mapping) for tool in self.tools)
        ):
            raise InvalidTypeError(
                f"tools must be a list of tool definitions (dicts), got {self.tools!r:.80}",
                parameter="tools",
                value=self.tools,
            )
        for name in check_mapping("chat_template_kwargs", self.chat_template_kwargs) or {}:
            if name in _TEMPLATE_ARGUMENTS:
                raise InvalidParameterError(
                    f"chat_template_kwargs must not set {name!r}, which has its own place",
                    parameter="chat_template_kwargs",
                    value=name,
                )
        if self.content_format not in ("auto", "string", "openai"):
            raise InvalidParameterError(
                f"content_format must be auto, string or openai, got {self.content_format!r}",
                parameter="content_format",
                value=self.content_format,
            )


class Renderer:
    """Tokenizer, chat template and multimodal preprocessing of one engine."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: ChatTokenizer | None,
        mm_processor: MultiModalProcessor | None = None,
    ) -> None:
        self.config = config  # replaced once the core has settled lengths
        self.tokenizer = tokenizer
        self.mm_processor = mm_processor
        self._formats = ContentFormats(None if mm_processor is None else mm_processor.placeholder)
        self._longest_token: int | None = None
        self._bos_text: str | None = None
        self._warned_bos = False

    def get_tokenizer(self) -> ChatTokenizer:
        """The tokenizer.

        Raises:
            UnsupportedFeatureError: the engine was made with ``skip_tokenizer_init``.
        """
        if self.tokenizer is None:
            raise UnsupportedFeatureError(
                "this engine has no tokenizer (skip_tokenizer_init=True); give prompts as token ids"
            )
        return self.tokenizer

    def get_eos_token_id(self) -> int | None:
        eos_token_ids = self.config.model_config.eos_token_ids
        return eos_token_ids[0] if eos_token_ids else None

    # ------------------------------------------------------------------ completions

    def render_cmpl(
        self,
        prompts: Sequence[Any],
        tok_params: TokenizeParams | None = None,
        prompt_extras: Mapping[str, Any] | None = None,
    ) -> list[RenderedPrompt]:
        """Tokenise raw prompts. Already rendered ones pass unchanged.

        Args:
            prompt_extras: more keys for each result (``cache_salt``).

        Raises:
            RequestError: a prompt has an unknown form or an absurd length.
        """
        if isinstance(prompts, str | bytes | Mapping):  # else its characters would be the prompts
            raise InvalidTypeError(
                f"prompts must be a list of prompts, got {type(prompts).__name__}; give [prompt]",
                parameter="prompts",
                value=prompts,
            )
        params = tok_params or COMPLETION_TOKENIZE_PARAMS
        return [self._render(prompt, params, prompt_extras) for prompt in prompts]

    async def render_cmpl_async(
        self,
        prompts: Sequence[Any],
        tok_params: TokenizeParams | None = None,
        prompt_extras: Mapping[str, Any] | None = None,
    ) -> list[RenderedPrompt]:
        """`render_cmpl`; in a thread where long texts would hold up the event loop."""
        import asyncio

        if self.mm_processor is not None and any(map(holds_images, prompts)):
            return await self.mm_processor.run(self.render_cmpl, prompts, tok_params, prompt_extras)
        if _is_short(prompts):
            return self.render_cmpl(prompts, tok_params, prompt_extras)
        return await asyncio.to_thread(self.render_cmpl, prompts, tok_params, prompt_extras)

    def render_pairs(
        self, pairs: Sequence[TextPair], tok_params: TokenizeParams | None = None
    ) -> list[RenderedPrompt]:
        """Tokenise pairs of texts, each as one prompt.

        Raises:
            RequestError: a text cannot be tokenised, or has an absurd length.
        """
        params = tok_params or POOLING_TOKENIZE_PARAMS
        return [self._render_pair(pair, params) for pair in pairs]

    def _render_pair(self, pair: TextPair, params: TokenizeParams) -> RenderedPrompt:
        arrival_time = time.time()
        limit = truncation_limit(params, self.config.model_config.max_model_len)
        if limit is None:
            for text in pair:
                self._check_text_length(text)
        token_ids, types, num_cut = encode_pair(
            self.get_tokenizer(),
            pair,
            add_special_tokens=params.add_special_tokens,
            limit=limit,
            truncation_side=params.truncation_side or "right",
        )
        return RenderedPrompt(
            type="token",
            prompt_token_ids=token_ids,
            prompt=None,
            arrival_time=arrival_time,
            num_truncated_tokens=num_cut,
            token_type_ids=types,
        )

    def _render(
        self, prompt: Any, params: TokenizeParams, extras: Mapping[str, Any] | None
    ) -> RenderedPrompt:
        if is_rendered(prompt):
            rendered: RenderedPrompt = prompt
            return rendered
        arrival_time = time.time()
        parsed = parse_prompt(prompt)
        limit = truncation_limit(params, self.config.model_config.max_model_len)
        if parsed.embeds is not None:
            result = self._render_embeds(parsed, params, limit, arrival_time)
        elif parsed.images:
            salt = (extras or {}).get("cache_salt", parsed.cache_salt)
            result = self._render_images(parsed, params, limit, salt, arrival_time)
        else:
            result = self._render_tokens(parsed, params, limit, arrival_time)
        if extras:
            result.update(extras)  # type: ignore[typeddict-item]
        return result

    def _render_tokens(
        self,
        parsed: ParsedPrompt,
        params: TokenizeParams,
        limit: int | None,
        arrival_time: float,
    ) -> RenderedPrompt:
        """A prompt of text or ids."""
        token_ids = parsed.token_ids
        ends: tuple[list[int], list[int]] = ([], [])
        if token_ids is None:
            assert parsed.text is not None
            token_ids = self._tokenize(parsed.text, params)
            is_cut = limit is not None and len(token_ids) > limit
            if is_cut and params.pools and params.add_special_tokens:
                ends = special_ends(self.get_tokenizer(), parsed.text, token_ids)
        kept = truncate(token_ids, limit, params, ends)
        result = RenderedPrompt(
            type="token",
            prompt_token_ids=kept,
            prompt=parsed.text,
            cache_salt=parsed.cache_salt,
            arrival_time=arrival_time,
            num_truncated_tokens=len(token_ids) - len(kept),
        )
        if parsed.token_type_ids is not None:
            result["token_type_ids"] = truncate(parsed.token_type_ids, limit, params, ends)
        return result

    def _render_embeds(
        self,
        parsed: ParsedPrompt,
        params: TokenizeParams,
        limit: int | None,
        arrival_time: float,
    ) -> RenderedPrompt:
        """A prompt of embeddings: no ids, so zeros stand for them."""
        rows = prompt_rows(parsed.embeds, self.config.model_config, may_be_cut=limit is not None)
        kept = truncate(rows, limit, params)
        return RenderedPrompt(
            type="embeds",
            prompt_token_ids=[0] * len(kept),
            prompt=parsed.text,
            cache_salt=parsed.cache_salt,
            arrival_time=arrival_time,
            num_truncated_tokens=len(rows) - len(kept),
            prompt_embeds=kept,
        )

    def _render_images(
        self,
        parsed: ParsedPrompt,
        params: TokenizeParams,
        limit: int | None,
        cache_salt: str | None,
        arrival_time: float,
    ) -> RenderedPrompt:
        """A prompt with pictures, in place of whose placeholders stand what the encoder needs."""
        mm = self._images()
        images = mm.prepare(parsed.images, self.config.model_config.max_model_len, cache_salt)
        if parsed.token_ids is not None:
            encode = functools.partial(self.get_tokenizer().encode, add_special_tokens=False)
            token_ids = mm.expand_ids(parsed.token_ids, images, encode)
        else:
            assert parsed.text is not None
            token_ids = self._tokenize(mm.expand_text(parsed.text, images), params)
        if limit is not None and len(token_ids) > limit:
            raise ContextLengthError(
                f"the prompt has {len(token_ids)} tokens with its {len(images)} images, and one "
                f"with images cannot be truncated to {limit}; shorten it or send fewer images"
            )
        return RenderedPrompt(
            type="multimodal",
            prompt_token_ids=token_ids,
            prompt=parsed.text,
            cache_salt=parsed.cache_salt,
            arrival_time=arrival_time,
            num_truncated_tokens=0,
            mm_items=mm.find_places(token_ids, images),
        )

    def _images(self) -> MultiModalProcessor:
        """What prepares pictures; raises UnsupportedFeatureError where there is none."""
        if self.mm_processor is None:
            raise UnsupportedFeatureError(
                "images (image_url, multi_modal_data) are not supported by this engine: the model "
                "has no image encoder that runs here, or limit_mm_per_prompt switches it off"
            )
        return self.mm_processor

    def _tokenize(self, text: str, params: TokenizeParams) -> list[int]:
        tokenizer = self.get_tokenizer()
        if params.truncate_prompt_tokens is None:
            self._check_text_length(text)
        if params.add_special_tokens:
            self._warn_about_bos(text, tokenizer)
        return tokenizer.encode(text, add_special_tokens=params.add_special_tokens)

    def _check_text_length(self, text: str) -> None:
        """Refuse a text that cannot fit before spending time on it.

        No token stands for more characters than the vocabulary's longest one, so a text longer
        than the context times that many characters is too long whatever its tokens are.
        """
        max_model_len = self.config.model_config.max_model_len
        if len(text) <= 16 * max_model_len:
            return
        if self._longest_token is None:
            vocab = self.get_tokenizer().backend.get_vocab(with_added_tokens=True)
            self._longest_token = max(map(len, vocab), default=1)
        limit = max_model_len * self._longest_token
        if len(text) > limit:
            raise ContextLengthError(
                f"the prompt has {len(text)} characters, which is more than fits into a context of "
                f"{max_model_len} tokens; shorten it, or set truncate_prompt_tokens"
            )

    def _warn_about_bos(self, text: str, tokenizer: ChatTokenizer) -> None:
        if self._warned_bos or tokenizer.bos_token_id is None:
            return
        if self._bos_text is None:
            self._bos_text = tokenizer.convert_ids_to_tokens([tokenizer.bos_token_id])[0]
        if text.startswith(self._bos_text):
            self._warned_bos = True
            logger.warning(
                "the prompt already starts with %s, so no second one was added; chat() and "
                "render_chat() apply the template without this trap",
                self._bos_text,
            )

    # ------------------------------------------------------------------ chat

    def render_chat(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        chat_params: ChatParams | None = None,
        tok_params: TokenizeParams | None = None,
        prompt_extras: Mapping[str, Any] | None = None,
    ) -> tuple[list[list[dict[str, Any]]], list[RenderedPrompt]]:
        """Apply the chat template and tokenise.

        Returns:
            The conversations as the template saw them, and one rendered prompt each.

        Raises:
            RequestError: a message is malformed, or the template refuses the conversation.
        """
        chat = chat_params or ChatParams()
        if chat.add_generation_prompt and chat.continue_final_message:
            raise InvalidParameterError(
                "continue_final_message needs add_generation_prompt=False",
                parameter="continue_final_message",
                value=True,
            )
        params = tok_params or CHAT_TOKENIZE_PARAMS
        shown, rendered = [], []
        for messages in conversations:
            arrival_time = time.time()
            conversation = check_messages(messages)
            if conversation.images:
                self._images()  # before the template wonders
            shown.append(self._with_contents(conversation, chat))
            text = self._apply_template(shown[-1], chat)
            raw: Any = text
            if conversation.images:
                raw = {
                    "prompt": text,
                    "multi_modal_data": {"image": [i.data for i in conversation.images]},
                    "multi_modal_uuids": {"image": [i.uuid for i in conversation.images]},
                }
            prompt = self._render(raw, params, prompt_extras)
            prompt["arrival_time"] = arrival_time
            rendered.append(prompt)
        return shown, rendered

    def _with_contents(self, conversation: Conversation, chat: ChatParams) -> list[dict[str, Any]]:
        """The messages, with contents in the form that the template reads."""
        content_format = chat.content_format
        if content_format == "auto":
            template = chat.chat_template or self._default_template()
            probe = functools.partial(
                self.get_tokenizer().apply_chat_template, chat_template=template
            )
            content_format = self._formats.find(template, probe)
        placeholder = "" if self.mm_processor is None else self.mm_processor.placeholder
        return conversation.with_contents(content_format, placeholder)

    async def render_chat_async(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        chat_params: ChatParams | None = None,
        tok_params: TokenizeParams | None = None,
        prompt_extras: Mapping[str, Any] | None = None,
    ) -> tuple[list[list[dict[str, Any]]], list[RenderedPrompt]]:
        """`render_chat`; in a thread where long texts would hold up the event loop.

        So would a template that comes with a request: nobody knows how long it runs.
        """
        import asyncio

        if self.mm_processor is not None and has_image_parts(conversations):
            return await self.mm_processor.run(
                self.render_chat, conversations, chat_params, tok_params, prompt_extras
            )
        chat = chat_params or ChatParams()
        if chat.chat_template is None and _is_short(
            conversations, chat.tools, chat.chat_template_kwargs
        ):
            return self.render_chat(conversations, chat_params, tok_params, prompt_extras)
        return await asyncio.to_thread(
            self.render_chat, conversations, chat_params, tok_params, prompt_extras
        )

    def _apply_template(self, messages: list[dict[str, Any]], chat: ChatParams) -> str:
        return self.get_tokenizer().apply_chat_template(
            messages,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            tools=chat.tools,
            chat_template=chat.chat_template or self._default_template(),
            **(chat.chat_template_kwargs or {}),
        )

    def _default_template(self) -> str | None:
        """The user's template; None = the tokenizer's choice among its own, if it has some."""
        model = self.config.model_config
        if model.own_chat_template is not None or self.get_tokenizer().chat_templates:
            return model.own_chat_template
        return model.chat_template

    # ------------------------------------------------------------------ multimodal cache, end

    def clear_mm_cache(self) -> None:
        """Forget processed multimodal items, in step with the core's cache."""
        if self.mm_processor is not None:
            self.mm_processor.clear()

    async def clear_mm_cache_async(self) -> None:
        self.clear_mm_cache()

    def stat_mm_cache(self) -> CacheStats | None:
        """Hits since the last call; None without a cache."""
        return None if self.mm_processor is None else self.mm_processor.take_stats()

    def shutdown(self) -> None:
        """Release the cache. Idempotent."""
        if self.mm_processor is not None:
            self.mm_processor.shutdown()


def _is_short(*parts: Any) -> bool:
    """Whether all strings in ``parts`` together have at most `INLINE_CHARS` characters.

    Other plain values count as one, so that this ends soon, whatever is given; bytes and objects
    may be pictures, which are never short.
    """
    left = INLINE_CHARS
    rest = list(parts)
    while rest and left >= 0:
        part = rest.pop()
        if isinstance(part, str):
            left -= len(part)
        elif isinstance(part, Mapping):
            left -= 1
            for item in islice(part.items(), INLINE_CHARS + 1):
                rest.extend(item)
        elif isinstance(part, list | tuple):
            left -= 1
            rest.extend(part[: INLINE_CHARS + 1])
        elif part is None or isinstance(part, int | float):
            left -= 1
        else:
            return False
    return left >= 0
