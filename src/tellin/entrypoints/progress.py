"""Progress bars of offline calls. tqdm is imported only when a bar is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from tellin.outputs import PoolingRequestOutput, RequestOutput

UseTqdm = bool | Callable[..., Any]
"""False: none. True: tqdm's own bar, on standard error. Else a factory like ``tqdm.tqdm``."""

_T = TypeVar("_T")


def _make_bar(use_tqdm: UseTqdm, **kwargs: Any) -> Any | None:
    if use_tqdm is False:
        return None
    if callable(use_tqdm):
        return use_tqdm(**kwargs)
    from tqdm import tqdm

    return tqdm(**kwargs)


def rendering(items: Iterable[_T], total: int, use_tqdm: UseTqdm) -> Iterator[_T]:
    """The items, with a bar that ticks for each."""
    bar = _make_bar(use_tqdm, total=total, desc="Adding requests", dynamic_ncols=True)
    try:
        for item in items:
            yield item
            if bar is not None:
                bar.update(1)
    finally:
        if bar is not None:
            bar.close()


class GenerationBar:
    """Counts completions, and shows tokens per second since it was made."""

    def __init__(self, total: int, use_tqdm: UseTqdm) -> None:
        self._bar = _make_bar(
            use_tqdm, total=total, desc="Processed prompts", dynamic_ncols=True, postfix=""
        )
        self._num_input_tokens = 0
        self._num_output_tokens = 0

    def update(self, output: RequestOutput | PoolingRequestOutput) -> None:
        """A request has finished."""
        if self._bar is None:
            return
        if not isinstance(output, RequestOutput):
            self._bar.update(1)
            return
        num_completions = max(1, len(output.outputs))
        self._num_input_tokens += len(output.prompt_token_ids or ()) * num_completions
        self._num_output_tokens += sum(len(c.token_ids) for c in output.outputs)
        elapsed = self._bar.format_dict["elapsed"] if hasattr(self._bar, "format_dict") else 0
        if elapsed:
            self._bar.set_postfix_str(
                f"input {self._num_input_tokens / elapsed:.1f} tokens/s, "
                f"output {self._num_output_tokens / elapsed:.1f} tokens/s",
                refresh=False,
            )
        self._bar.update(num_completions)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
