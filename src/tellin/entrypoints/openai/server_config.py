"""What a user may say about the server; engine arguments are `EngineArgs`."""

from __future__ import annotations

from dataclasses import dataclass

from tellin.checks import check_float, check_int
from tellin.entrypoints.openai.parsers.reasoning import REASONING_PARSERS
from tellin.entrypoints.openai.parsers.registry import TOOL_PARSERS
from tellin.exceptions import InvalidParameterError

DEFAULT_PORT = 8000
DEFAULT_MAX_BODY_BYTES = 32 << 20
DEFAULT_MAX_QUEUE = 256


@dataclass(frozen=True)
class ServerConfig:
    """Checked at construction.

    Raises:
        InvalidParameterError: a value that cannot be followed.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    """0 = any free port."""
    served_model_names: tuple[str, ...] = ()
    """Names that requests may use; the first one is shown in answers. Empty = the engine's."""
    api_keys: tuple[str, ...] = ()
    """Any of them opens the API; empty = open to all who can connect."""
    enable_admin: bool = False
    admin_key: str | None = None
    allowed_origins: tuple[str, ...] = ()
    """Web pages of other origins that may call; ``*`` = any."""
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    header_timeout_s: float = 30.0
    """Longest time that the head of a request may take to arrive."""
    body_timeout_s: float = 30.0
    """Longest time that the body of a request may take to arrive."""
    request_timeout_s: float | None = 600.0
    """Deadline of a request, queueing included; None = none."""
    drain_timeout_s: float = 30.0
    """Time that open requests get when the server is told to end."""
    health_timeout_s: float = 60.0
    """The engine is unhealthy after so long without a step while requests are live."""
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    trust_request_chat_template: bool = False
    """Whether a request may bring its own chat template, which is a program."""
    lora_modules: tuple[tuple[str, str], ...] = ()
    """Name and path of LoRA adapters that are loaded at the start."""
    enable_page: bool = True
    """Whether ``/`` and ``/engine`` are there, for people who look."""
    allowed_hosts: tuple[str, ...] = ()
    """Names in ``Host`` that are answered, ``*`` = any. Empty = any, but for a server on loopback
    without keys: see `tellin.entrypoints.openai.hosts`."""

    def __post_init__(self) -> None:
        check_int("port", self.port, 0, 65535)
        check_int("max_body_bytes", self.max_body_bytes, 1024)
        timeouts = ("header_timeout_s", "body_timeout_s", "drain_timeout_s", "health_timeout_s")
        for name in timeouts:
            check_float(name, getattr(self, name), 0, 1e6)
        if self.request_timeout_s is not None:
            check_float("request_timeout_s", self.request_timeout_s, 0, 1e6, open_low=True)
        self._check_choice("tool_call_parser", ("auto", *TOOL_PARSERS))
        self._check_choice("reasoning_parser", ("auto", "none", *REASONING_PARSERS))
        keys = (*self.api_keys, *(() if self.admin_key is None else (self.admin_key,)))
        if any(not key.strip() for key in keys):
            raise InvalidParameterError("a key must not be empty", parameter="api_key")
        names = [name for name, _ in self.lora_modules]
        for name in names:
            if names.count(name) > 1 or name in self.served_model_names:
                raise InvalidParameterError(
                    f"the LoRA adapter's name {name!r} is given twice, or is the model's",
                    parameter="lora",
                    value=name,
                )
        if self.enable_admin != (self.admin_key is not None):
            raise InvalidParameterError(
                "admin calls need both --enable-admin and --admin-key", parameter="admin_key"
            )
        if self.admin_key in self.api_keys:
            raise InvalidParameterError(
                "the admin key must differ from the API keys", parameter="admin_key"
            )

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        if getattr(self, name) not in choices:
            raise InvalidParameterError(
                f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}",
                parameter=name,
                value=getattr(self, name),
            )
