"""``/tokenize`` and ``/detokenize``: what the model reads, without running it."""

from __future__ import annotations

import asyncio
from typing import Any

from tellin.engine.prompts import CHAT_TOKENIZE_PARAMS, TokenizeParams
from tellin.engine.renderer import ChatParams
from tellin.entrypoints.openai.chat import check_template_kwargs, render_chat
from tellin.entrypoints.openai.errors import bad_request
from tellin.entrypoints.openai.replies import Detokenization, Tokenization
from tellin.entrypoints.openai.requests import DetokenizeRequest, TokenizeRequest
from tellin.entrypoints.openai.serving import ServingContext


class TokenizationService:
    def __init__(self, context: ServingContext) -> None:
        self.context = context

    async def tokenize(self, request: TokenizeRequest) -> Tokenization:
        """Token ids of a prompt or of a conversation."""
        self.context.check_model(request.model)
        tokenizer: Any = self.context.engine.get_tokenizer()
        if request.prompt is not None:
            add_special = request.add_special_tokens is not False
            token_ids = await asyncio.to_thread(
                tokenizer.encode, request.prompt, add_special, request.parse_special
            )
        else:
            token_ids = await self._conversation(request)
        max_model_len = self.context.engine.model_config.max_model_len
        reply = Tokenization(token_ids, len(token_ids), max_model_len)
        if request.return_token_strs:
            reply.token_strs = tokenizer.convert_ids_to_tokens(token_ids)
        return reply

    async def _conversation(self, request: TokenizeRequest) -> list[int]:
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
        params = ChatParams(
            add_generation_prompt=request.add_generation_prompt
            and not request.continue_final_message,
            continue_final_message=request.continue_final_message,
            chat_template_kwargs=check_template_kwargs(request.chat_template_kwargs),
        )
        tok_params = CHAT_TOKENIZE_PARAMS
        if request.add_special_tokens:
            tok_params = TokenizeParams(add_special_tokens=True)
        rendered = await render_chat(
            self.context, request.messages or [], tools or None, params, tok_params
        )
        return rendered["prompt_token_ids"]

    async def detokenize(self, request: DetokenizeRequest) -> Detokenization:
        """Text of token ids, special tokens included."""
        self.context.check_model(request.model)
        tokenizer = self.context.engine.get_tokenizer()
        vocab_size = self.context.engine.model_config.vocab_size
        unknown = next((token for token in request.tokens if token >= vocab_size), None)
        if unknown is not None:
            raise bad_request(
                f"tokens has the id {unknown}, but the vocabulary ends at {vocab_size - 1}",
                "tokens",
                "invalid_value",
            )
        text = await asyncio.to_thread(tokenizer.decode, request.tokens, False)
        return Detokenization(text)
