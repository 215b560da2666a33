"""The border between the shell and the core: two protocols, one factory, and the in-process client.

The shell talks to an engine core only through one of these. Whether the core lives in this thread,
another thread or another process is decided once, by `make_client`, and shows nowhere else.
"""

from __future__ import annotations

import importlib
from typing import Any, Literal, Protocol, overload

from tellin.config import EngineConfig
from tellin.engine.control_checks import check_call
from tellin.exceptions import EngineClosedError, InvalidParameterError
from tellin.protocol import EngineCoreOutputs, EngineCoreReady, EngineCoreRequest


class CoreClient(Protocol):
    """What all clients have in common."""

    ready: EngineCoreReady

    def dp_engines_running(self) -> bool:
        """Whether other data-parallel ranks of this client still work."""
        ...

    def shutdown(self, timeout: float | None = None) -> None:
        """End the core. Idempotent."""
        ...


class SyncCoreClient(CoreClient, Protocol):
    """Client of `LLMEngine`."""

    def get_output(self, timeout: float | None = None) -> EngineCoreOutputs:
        """Next batch; empty if there was none (within ``timeout`` seconds, where it can block)."""
        ...

    def add_request(self, request: EngineCoreRequest) -> None: ...
    def abort_requests(self, request_ids: list[str]) -> None: ...

    def call_utility(self, method: str, *args: Any) -> Any:
        """Call a control method of the core and return its result."""
        ...


class AsyncCoreClient(CoreClient, Protocol):
    """Client of `AsyncLLM`."""

    @property
    def engine_dead(self) -> bool: ...
    def check_alive(self) -> None: ...
    async def get_output_async(self) -> EngineCoreOutputs: ...
    async def add_request_async(self, request: EngineCoreRequest) -> None: ...
    async def abort_requests_async(self, request_ids: list[str]) -> None: ...
    async def call_utility_async(self, method: str, *args: Any) -> Any: ...


class EngineCoreClient:
    """Where clients come from."""

    @overload
    @staticmethod
    def make_client(
        multiprocess_mode: bool,
        asyncio_mode: Literal[False],
        config: EngineConfig,
        executor_class: type[Any] | None,
        log_stats: bool,
    ) -> SyncCoreClient: ...
    @overload
    @staticmethod
    def make_client(
        multiprocess_mode: bool,
        asyncio_mode: Literal[True],
        config: EngineConfig,
        executor_class: type[Any] | None,
        log_stats: bool,
    ) -> AsyncCoreClient: ...
    @staticmethod
    def make_client(
        multiprocess_mode: bool,
        asyncio_mode: bool,
        config: EngineConfig,
        executor_class: type[Any] | None,
        log_stats: bool,
    ) -> SyncCoreClient | AsyncCoreClient:
        """Start a core and return the client for it.

        ============== ======= =================================================
        multi-process  asyncio client
        ============== ======= =================================================
        no             no      `InprocClient`: the caller drives each step
        yes            no      `SyncMPClient`: the core in a child process
        yes            yes     `AsyncMPClient`: the core in a child process
        no             yes     `AsyncThreadClient`: the core in a thread
        ============== ======= =================================================

        Args:
            executor_class: None = what ``config.parallel_config`` names.
        """
        if executor_class is None:
            executor_class = resolve_executor_class(config)
        if not (multiprocess_mode or asyncio_mode):
            return InprocClient(config, executor_class, log_stats)
        # Loaded by name: the others bring in threads and the transport, which nobody else needs.
        module, name = {
            (True, False): ("tellin.engine.mp_client", "SyncMPClient"),
            (True, True): ("tellin.engine.mp_client", "AsyncMPClient"),
            (False, True): ("tellin.engine.thread_client", "AsyncThreadClient"),
        }[multiprocess_mode, asyncio_mode]
        client_class = getattr(importlib.import_module(module), name)
        client: SyncCoreClient | AsyncCoreClient = client_class(config, executor_class, log_stats)
        return client


def resolve_executor_class(config: EngineConfig) -> type[Any]:
    """The executor class that the configuration names."""
    from tellin.core.executor_choice import get_executor_class

    return get_executor_class(config)


class InprocClient:
    """The core in this thread: every call is a method call, exceptions pass unchanged."""

    def __init__(self, config: EngineConfig, executor_class: type[Any], log_stats: bool) -> None:
        from tellin.core.engine_core import EngineCore

        self._engine_core: EngineCore | None = EngineCore(config, executor_class, log_stats)
        self.ready = self._engine_core.ready

    @property
    def engine_core(self) -> Any:
        """The core itself.

        Raises:
            EngineClosedError: after `shutdown`.
        """
        if self._engine_core is None:
            raise EngineClosedError("the engine has been shut down; create a new one")
        return self._engine_core

    def get_output(self, timeout: float | None = None) -> EngineCoreOutputs:
        """Run one step of the core; ``timeout`` has no meaning here, a step always ends."""
        core = self.engine_core
        outputs, executed = core.step()
        core.post_step(executed)
        return (outputs and outputs.get(0)) or EngineCoreOutputs()

    def add_request(self, request: EngineCoreRequest) -> None:
        core = self.engine_core
        core.add_request(core.preprocess_add_request(request))

    def abort_requests(self, request_ids: list[str]) -> None:
        if request_ids and self._engine_core is not None:
            self._engine_core.abort_requests(request_ids)

    def call_utility(self, method: str, *args: Any) -> Any:
        args = check_call(method, args)
        if method in ("sleep", "pause_scheduler") and "wait" in args:
            raise InvalidParameterError(
                f"{method}(mode='wait') cannot work in process: nobody would run the steps it "
                "waits for; finish the requests first, or use mode='abort' or 'keep'",
                parameter="mode",
                value="wait",
            )
        return getattr(self.engine_core, method)(*args)

    def dp_engines_running(self) -> bool:
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        core, self._engine_core = self._engine_core, None
        if core is not None:
            core.shutdown()
