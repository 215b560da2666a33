"""Environment variables, read once into an immutable object.

Nothing else in tellin reads ``os.environ``. `Settings.from_environ` is called when a configuration
is built; later changes of the environment have no effect on engines that exist.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tellin.exceptions import InvalidParameterError


@dataclass(frozen=True)
class Settings:
    """Every ``TELLIN_*`` variable, its type and its default."""

    home: Path
    """TELLIN_HOME: folder of pulled models (default: the user's cache folder + ``tellin``)."""
    isa: str | None = None
    """TELLIN_ISA: a kernel variant: portable, avx2, avxvnni, avx512, amx, amx-bf16 or neon."""
    num_threads: int | None = None
    """TELLIN_NUM_THREADS: size of the kernel thread team."""
    enable_multiprocessing: bool = False
    """TELLIN_ENABLE_MULTIPROCESSING: `LLMEngine` runs its core in a child process."""
    log_stats_interval_s: float = 10.0
    """TELLIN_LOG_STATS_INTERVAL: least seconds between two periodic log lines."""
    engine_ready_timeout_s: float = 600.0
    """TELLIN_ENGINE_READY_TIMEOUT_S: how long a client waits for its core to start."""
    shutdown_timeout_s: float = 5.0
    """TELLIN_SHUTDOWN_TIMEOUT_S: grace before children are killed."""
    max_n_sequences: int = 16384
    """TELLIN_MAX_N_SEQUENCES: upper bound of ``SamplingParams.n``."""
    msgpack_zero_copy_threshold: int = 256
    """TELLIN_MSGPACK_ZERO_COPY_THRESHOLD: arrays of fewer bytes travel inline."""
    allow_insecure_serialization: bool = False
    """TELLIN_ALLOW_INSECURE_SERIALIZATION: allow pickled callables between shell and core."""
    output_chunk_size: int = 128
    """TELLIN_OUTPUT_CHUNK_SIZE: the async output handler yields every so many outputs."""
    rpc_base_path: str | None = None
    """TELLIN_RPC_BASE_PATH: folder of ``ipc://`` sockets (default: a temporary folder)."""
    profiling_scopes: bool = False
    """TELLIN_PROFILING_SCOPES: name the phases of a step in the profiler."""
    check_invariants: bool = False
    """TELLIN_CHECK_INVARIANTS: assert the scheduler's invariants after each step (slow)."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read the environment.

        Raises:
            InvalidParameterError: a variable does not parse, or is out of range; the message names
                it and its value.
        """
        env = os.environ if environ is None else environ

        def get(name: str, parse: type, default: object) -> object:
            raw = env.get(f"TELLIN_{name}")
            if raw is None or raw == "":
                return default
            try:
                if parse is bool:
                    return {"1": True, "true": True, "0": False, "false": False}[raw.lower()]
                return parse(raw)
            except (ValueError, KeyError):
                raise InvalidParameterError(
                    f"environment variable TELLIN_{name}={raw!r} is not a valid {parse.__name__}",
                    parameter=f"TELLIN_{name}",
                    value=raw,
                ) from None

        def number(name: str, parse: type, default: float, low: float) -> float:
            value = float(str(get(name, parse, default)))
            if not low <= value < math.inf:  # false for NaN too
                raise InvalidParameterError(
                    f"environment variable TELLIN_{name} must be at least {low:g}, got {value:g}",
                    parameter=f"TELLIN_{name}",
                    value=value,
                )
            return value

        interval = get("LOG_STATS_INTERVAL", float, 10.0)
        return cls(
            home=_home(env),
            isa=get("ISA", str, None),  # type: ignore[arg-type]
            num_threads=get("NUM_THREADS", int, None),  # type: ignore[arg-type]
            enable_multiprocessing=bool(get("ENABLE_MULTIPROCESSING", bool, False)),
            log_stats_interval_s=interval if isinstance(interval, float) and interval > 0 else 10.0,
            engine_ready_timeout_s=number("ENGINE_READY_TIMEOUT_S", float, 600.0, 0.0),
            shutdown_timeout_s=number("SHUTDOWN_TIMEOUT_S", float, 5.0, 0.0),
            max_n_sequences=int(number("MAX_N_SEQUENCES", int, 16384, 1)),
            msgpack_zero_copy_threshold=int(number("MSGPACK_ZERO_COPY_THRESHOLD", int, 256, 0)),
            allow_insecure_serialization=bool(get("ALLOW_INSECURE_SERIALIZATION", bool, False)),
            output_chunk_size=int(number("OUTPUT_CHUNK_SIZE", int, 128, 1)),
            rpc_base_path=get("RPC_BASE_PATH", str, None),  # type: ignore[arg-type]
            profiling_scopes=bool(get("PROFILING_SCOPES", bool, False)),
            check_invariants=bool(get("CHECK_INVARIANTS", bool, False)),
        )


def _home(env: Mapping[str, str]) -> Path:
    """The folder of TELLIN_HOME, or ``tellin`` in the user's folder for caches."""
    try:
        if env.get("TELLIN_HOME"):
            return Path(env["TELLIN_HOME"]).expanduser()
        cache = env.get("XDG_CACHE_HOME") or Path(env.get("HOME") or "~").expanduser() / ".cache"
        return Path(cache, "tellin").expanduser()
    except RuntimeError as error:  # ~nobody/, or a user without a home, as containers have them
        raise InvalidParameterError(
            f"there is no folder for models: {error} Set TELLIN_HOME to one",
            parameter="TELLIN_HOME",
            value=env.get("TELLIN_HOME"),
        ) from None
