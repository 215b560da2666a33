"""All exceptions that tellin raises on purpose.

TellinError
├── RequestError (also ValueError)       this request is wrong; the engine is fine     HTTP 400
│   ├── InvalidParameterError            one named parameter has a bad value
│   │   └── InvalidTypeError             ... or a value of the wrong type (also TypeError)
│   ├── ContextLengthError               prompt or prompt + output does not fit
│   ├── UnsupportedFeatureError          this model or build cannot do what was asked
│   ├── DuplicateRequestError            a live request already has this id            HTTP 409
│   └── AdapterError                     a LoRA adapter cannot be used
│       ├── AdapterNotFoundError         ... there is none at its path                 HTTP 404
│       └── AdapterCapacityError         ... there is no room (also RuntimeError)
├── RequestFailedError                   this request failed after admission           HTTP 500
│   └── RequestTimeoutError              ... its own deadline passed (also TimeoutError)  HTTP 504
├── LoadError
│   ├── ModelNotFoundError               no such file, folder or model name            HTTP 404
│   ├── ModelDownloadError               a model could not be fetched into the store
│   ├── ModelLoadError                   the file is damaged or not what it claims
│   ├── UnsupportedModelError            architecture or weight format not supported
│   └── OutOfMemoryError                 weights or KV pool do not fit (also MemoryError)
└── EngineError
    ├── EngineStartError                 the engine core could not start
    ├── EngineDeadError                  the engine core is gone; nothing will complete HTTP 503
    ├── EngineClosedError                used after shutdown()
    └── EngineOverloadedError            admission queue is full; try later            HTTP 429

Messages say what was wrong, with which value, the limit, and what to do: in that order, in one
line.
"""

from __future__ import annotations

from typing import Any


class TellinError(Exception):
    """Base of every exception raised on purpose by tellin."""


class RequestError(TellinError, ValueError):
    """The request is not acceptable. Nothing was queued; the engine is unharmed."""


class InvalidParameterError(RequestError):
    """One parameter has an unusable value.

    Attributes:
        parameter: name of the parameter, as the user wrote it.
        value: the rejected value.
    """

    def __init__(self, message: str, *, parameter: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value


class InvalidTypeError(InvalidParameterError, TypeError):
    """One parameter has a value of the wrong type."""


class UnknownMethodError(InvalidParameterError, NotImplementedError):
    """Workers have no method of this name."""


class ContextLengthError(RequestError):
    """The prompt, or prompt plus requested output, is longer than can ever fit."""


class UnsupportedFeatureError(RequestError):
    """The loaded model, the configuration or this build cannot do what was asked."""


class DuplicateRequestError(RequestError):
    """A live request already has this id."""


class AdapterError(RequestError):
    """A LoRA adapter is damaged, does not fit the model, or its name or id is taken."""


class AdapterNotFoundError(AdapterError):
    """There is no LoRA adapter at the path that a request names."""


class AdapterCapacityError(AdapterError, RuntimeError):
    """There is no room for another LoRA adapter."""


class RequestFailedError(TellinError):
    """A request failed after it was admitted (finish reason ``error``); others go on."""


class RequestTimeoutError(RequestFailedError, TimeoutError):
    """A request was not done within the deadline that its caller set, and was aborted."""


class LoadError(TellinError):
    """A model could not be opened."""


class ModelNotFoundError(LoadError):
    """No such file, folder or known model name."""


class ModelDownloadError(LoadError):
    """A model could not be fetched; the store is as it was before."""


class ModelLoadError(LoadError):
    """A model file is damaged or contradicts itself; the message names file and fault."""


class UnsupportedModelError(LoadError):
    """The architecture or the weight format is not supported."""


class OutOfMemoryError(LoadError, MemoryError):
    """Weights or KV cache do not fit into the memory this process may use."""


class EngineError(TellinError):
    """The engine as a whole cannot serve."""


class EngineStartError(EngineError):
    """The engine core failed while starting; the message carries its reason."""


class EngineDeadError(EngineError):
    """The engine core died. Every open request is lost; make a new engine."""

    def __init__(self, reason: str = "") -> None:
        """``reason``: what happened, or the whole message of another such error."""
        what = "the engine core died and cannot serve any more requests"
        if not reason.startswith(what):
            because = f": {reason}" if reason else ""
            reason = f"{what}{because}; see the log above for the cause and create a new engine"
        super().__init__(reason)


class EngineClosedError(EngineError):
    """The engine was used after ``shutdown()``."""


class EngineOverloadedError(EngineError):
    """The bounded admission queue is full; retry later."""
