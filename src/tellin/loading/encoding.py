"""What calling a tokenizer gives: ids and masks of one text or of several, padded if wanted.

Follows the calls that are written for the transformers library, as far as they need no tensors of
PyTorch: arrays of NumPy and plain lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tellin.exceptions import InvalidParameterError


class Encoding(dict[str, Any]):
    """``input_ids`` and ``attention_mask``, as items or as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def encode_texts(
    encode: Callable[[str], list[int]],
    text: str | Sequence[str],
    *,
    pad_token_id: int | None,
    ends: tuple[int, int] = (0, 0),
    padding: bool | str = False,
    truncation: bool = False,
    max_length: int | None = None,
    return_tensors: str | None = None,
) -> Encoding:
    """Encode one text or several.

    Args:
        encode: makes the ids of one text.
        text: a text gives flat lists, a list of texts gives lists of lists.
        pad_token_id: what shorter ones are filled with, on the right.
        ends: how many special tokens ``encode`` puts before and behind a text; cutting keeps them.
        padding: True or ``"longest"``; ``"max_length"``: to ``max_length``.
        truncation: cut texts on the right, to ``max_length`` tokens.
        return_tensors: None for lists, ``"np"`` for int64 arrays, always of two dimensions.

    Raises:
        InvalidParameterError: a text is none, or options contradict.
    """
    if padding not in (True, False, "longest", "max_length", "do_not_pad"):
        raise _invalid("padding", padding, "must be True, False, 'longest' or 'max_length'")
    if return_tensors not in (None, "np"):
        raise _invalid("return_tensors", return_tensors, "must be None or 'np'")
    if max_length is None and (truncation or padding == "max_length"):
        raise _invalid("max_length", max_length, "is needed to cut texts, or to pad to a length")
    is_single = isinstance(text, str)
    rows = [encode(one) for one in ([text] if isinstance(text, str) else text)]
    if truncation and max_length is not None:
        rows = [_cut(row, max_length, *ends) for row in rows]
    masks = [[1] * len(row) for row in rows]
    if padding not in (False, "do_not_pad"):
        width = max(map(len, rows), default=0)
        if padding == "max_length" and max_length is not None:
            width = max_length
        if pad_token_id is None and any(len(row) < width for row in rows):
            raise _invalid("padding", padding, "needs a model that has a padding token")
        for row, mask in zip(rows, masks, strict=True):
            missing = max(width - len(row), 0)
            row += [pad_token_id or 0] * missing
            mask += [0] * missing
    if return_tensors is None:
        values = {"input_ids": rows, "attention_mask": masks}
        return Encoding({name: v[0] for name, v in values.items()} if is_single else values)
    import numpy as np

    if len({len(row) for row in rows}) > 1:
        raise _invalid("return_tensors", return_tensors, "needs texts of one length; set padding")
    return Encoding(input_ids=np.array(rows, np.int64), attention_mask=np.array(masks, np.int64))


def _cut(row: list[int], length: int, before: int, behind: int) -> list[int]:
    if len(row) <= length:
        return row
    if length < before + behind:
        raise _invalid("max_length", length, f"must be at least {before + behind}")
    return row[: length - behind] + row[len(row) - behind :]


def _invalid(name: str, value: object, rule: str) -> InvalidParameterError:
    return InvalidParameterError(f"{name} {rule}, got {value!r}", parameter=name, value=value)
