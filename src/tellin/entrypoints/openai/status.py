"""How the server and its engine are, and the few calls that change it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from tellin.checks import check_int
from tellin.entrypoints.openai.errors import ApiError, bad_request, not_ready
from tellin.entrypoints.openai.replies import ModelCard, ModelList
from tellin.entrypoints.openai.serving import ServingContext
from tellin.exceptions import EngineClosedError, EngineDeadError, EngineError

SLEEP_MODES = ("abort", "wait", "keep")
PROBE_TIMEOUT_S = 5.0
"""How long the engine may take to answer a probe: a step of a large model takes seconds."""


Result = TypeVar("Result")


class StatusService:
    def __init__(self, context: ServingContext) -> None:
        self.context = context

    def models(self) -> ModelList:
        """All names under which the model is served, and its adapters."""
        context = self.context
        names = (*context.model_names, *context.adapters.names)
        return ModelList([self._card(name) for name in names])

    def model(self, name: str) -> ModelCard:
        self.context.check_model(name)
        return self._card(name)

    def _card(self, name: str) -> ModelCard:
        context = self.context
        max_model_len = context.engine.model_config.max_model_len
        adapter = context.adapters.get(name)
        if adapter is None:
            return ModelCard(name, context.created, max_model_len)
        created = context.adapters.created[name]
        return ModelCard(
            name, created, max_model_len, root=adapter.lora_path, parent=context.model_name
        )

    def version(self) -> str:
        from tellin import __version__

        return str(__version__)

    def metrics(self) -> str:
        """Prometheus' text; raises 400 if statistics are off."""
        return self.context.engine.prometheus_text() + self.context.http_metrics.exposition()

    async def check_health(self) -> None:
        """Raise 503 if the engine is dead, or makes no progress although it should."""
        try:
            await self.context.engine.check_health(self.context.config.health_timeout_s)
        except EngineError as error:
            raise not_ready(str(error)) from None

    async def check_ready(self) -> None:
        """Raise 503 if a request sent now would not be served."""
        self.context.check_accepts()
        await self.check_health()
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                is_paused = await self.context.engine.is_paused()
        except TimeoutError:
            raise not_ready("the engine does not answer") from None
        if is_paused:
            raise not_ready("the engine is paused or asleep")

    async def change(self, call: Awaitable[Result]) -> Result:
        """Await a call that changes the engine; raise 409 if its state does not allow that."""
        try:
            return await call
        except (EngineDeadError, EngineClosedError):
            raise
        except EngineError as error:
            raise ApiError(409, str(error), code="conflict") from None

    async def sleep(self, level: int, mode: str) -> None:
        check_int("level", level, 0, 2)
        if mode not in SLEEP_MODES:
            raise bad_request(f"mode must be one of {', '.join(SLEEP_MODES)}, got {mode!r}", "mode")
        await self.change(self.context.engine.sleep(level, mode))
