"""LoRA adapters of a server: each is a model name of its own in the API.

Owns names and ids; weights are the engine's. A name is known once its adapter is loaded, and not a
moment longer than until it is unloaded; requests that run then end with it (see the engine core).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping

from tellin.engine.async_llm import AsyncLLM
from tellin.entrypoints.openai.errors import ApiError, bad_request
from tellin.exceptions import AdapterNotFoundError, InvalidParameterError
from tellin.protocol import LoRARequest


class Adapters:
    """Adapters by name.

    Args:
        engine: loads them.
        base_names: names of the base model; the first is the adapters' parent in lists.
        static: path by name of those that are there from the start; see `load_static`.
    """

    def __init__(
        self, engine: AsyncLLM, base_names: tuple[str, ...], static: Mapping[str, str]
    ) -> None:
        self.created: dict[str, int] = {}
        """Unix time at which each was loaded."""
        self._engine = engine
        self._base_names = base_names
        self._static = dict(static)
        self._by_name: dict[str, LoRARequest] = {}
        self._ids = itertools.count(1)
        self._lock = asyncio.Lock()  # one change at a time: no name is loaded twice

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    def get(self, name: str | None) -> LoRARequest | None:
        """The adapter of that name; None for the base model."""
        return None if name is None else self._by_name.get(name)

    async def load_static(self) -> None:
        """Load those that were named at the start.

        Raises:
            InvalidParameterError, AdapterError: one cannot be loaded.
        """
        for name, path in self._static.items():
            try:
                await self.load(name, path)
            except ApiError as error:
                raise InvalidParameterError(error.message, parameter="--lora") from None

    async def load(self, name: str, path: str, load_inplace: bool = False) -> LoRARequest:
        """Load an adapter; it can be used when this returns.

        Raises:
            ApiError: 400 for a name that is taken, 404 if there is no adapter at ``path``.
            AdapterError: it cannot be used.
        """
        async with self._lock:
            self._check_may_load(name, path, load_inplace)
            known = self._by_name.get(name)
            lora_id = next(self._ids) if known is None else known.lora_int_id
            request = LoRARequest(name, lora_id, path, load_inplace=load_inplace)
            try:
                await self._engine.add_lora(request)
            except AdapterNotFoundError as error:
                raise ApiError(404, str(error), "lora_path", "adapter_not_found") from None
            # Loading in place is a property of this call, not of the requests that will use it.
            self._by_name[name] = LoRARequest(name, lora_id, path)
            self.created[name] = int(time.time())
            return self._by_name[name]

    async def unload(self, name: str, lora_int_id: int | None = None) -> None:
        """Forget an adapter; its memory is free after the last request that uses it.

        Raises:
            ApiError: 404 for an unknown name, 400 for an id that is not this name's.
        """
        async with self._lock:
            known = self._by_name.get(name)
            if known is None:
                raise ApiError(
                    404, f"no LoRA adapter {name!r} is loaded", "lora_name", "adapter_not_found"
                )
            if lora_int_id not in (None, known.lora_int_id):
                raise bad_request(
                    f"the LoRA adapter {name!r} has id {known.lora_int_id}, not {lora_int_id}",
                    "lora_int_id",
                )
            del self._by_name[name], self.created[name]
            await self._engine.remove_lora(known.lora_int_id)

    def _check_may_load(self, name: str, path: str, load_inplace: bool) -> None:
        if self._engine.config.lora_config is None:
            raise bad_request(
                "LoRA is off; start the server with --enable-lora", code="lora_is_off"
            )
        for parameter, value in (("lora_name", name), ("lora_path", path)):
            if not value.strip():
                raise bad_request(f"{parameter} must not be empty", parameter)
        if name in self._base_names:
            raise bad_request(f"{name!r} is the name of the base model", "lora_name")
        if name in self._by_name and not load_inplace:
            raise bad_request(
                f"a LoRA adapter {name!r} is loaded; unload it first, or set load_inplace",
                "lora_name",
                "adapter_exists",
            )
