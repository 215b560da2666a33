"""tellin: an LLM inference engine for ordinary machines, with vLLM's architecture and API.

Importing it is cheap: every public name is loaded on first use. It prints nothing: messages go to
the logger ``tellin``, which is silent until the application configures logging.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tellin.config import EngineArgs, EngineConfig
    from tellin.config import EngineArgs as AsyncEngineArgs
    from tellin.engine.async_llm import AsyncLLM
    from tellin.engine.async_llm import AsyncLLM as AsyncLLMEngine
    from tellin.engine.llm_engine import LLMEngine
    from tellin.engine.prompts import EmbedsPrompt, TextPrompt, TokensPrompt
    from tellin.entrypoints.llm import LLM
    from tellin.exceptions import TellinError
    from tellin.outputs import (
        BeamSearchOutput,
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from tellin.protocol import LoRARequest
    from tellin.sampling_params import (
        BeamSearchParams,
        PoolingParams,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )

logging.getLogger("tellin").addHandler(logging.NullHandler())

_MODULE_OF = {
    "LLM": "tellin.entrypoints.llm",
    "LLMEngine": "tellin.engine.llm_engine",
    "AsyncLLM": "tellin.engine.async_llm",
    "EngineArgs": "tellin.config",
    "EngineConfig": "tellin.config",
    "TellinError": "tellin.exceptions",
    "TextPrompt": "tellin.engine.prompts",
    "TokensPrompt": "tellin.engine.prompts",
    "EmbedsPrompt": "tellin.engine.prompts",
    "BeamSearchOutput": "tellin.outputs",
    "ClassificationOutput": "tellin.outputs",
    "ClassificationRequestOutput": "tellin.outputs",
    "CompletionOutput": "tellin.outputs",
    "EmbeddingOutput": "tellin.outputs",
    "EmbeddingRequestOutput": "tellin.outputs",
    "Logprob": "tellin.outputs",
    "PoolingOutput": "tellin.outputs",
    "PoolingRequestOutput": "tellin.outputs",
    "RequestOutput": "tellin.outputs",
    "ScoringOutput": "tellin.outputs",
    "ScoringRequestOutput": "tellin.outputs",
    "LoRARequest": "tellin.protocol",
    "BeamSearchParams": "tellin.sampling_params",
    "PoolingParams": "tellin.sampling_params",
    "RequestOutputKind": "tellin.sampling_params",
    "SamplingParams": "tellin.sampling_params",
    "StructuredOutputsParams": "tellin.sampling_params",
}

_ALIASES = {"AsyncEngineArgs": "EngineArgs", "AsyncLLMEngine": "AsyncLLM"}
"""Further names that vLLM has for the same things."""

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EmbedsPrompt",
    "EngineArgs",
    "EngineConfig",
    "LLMEngine",
    "LoRARequest",
    "Logprob",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TellinError",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("tellin")
    elif name in _ALIASES:
        value = __getattr__(_ALIASES[name])
    elif name in _MODULE_OF:
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    else:
        raise AttributeError(f"module 'tellin' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
