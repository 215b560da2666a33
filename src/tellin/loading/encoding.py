"""What calling a tokenizer gives: ids and masks of one text or of several, padded if wanted.

Follows the calls that are written for the transformers library, as far as they need no tensors of
PyTorch: arrays of NumPy and plain lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tellin.checks import check_int
from tellin.exceptions import InvalidParameterError, InvalidTypeError

_PADDINGS = (True, False, "longest", "max_length", "do_not_pad")
_TRUNCATIONS = (None, True, False, "longest_first", "only_first", "do_not_truncate")


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
    truncation: bool | str | None = None,
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
        truncation: True, ``"longest_first"`` or ``"only_first"``: cut texts on the right, to
            ``max_length`` tokens. None does so too if there is a ``max_length`` and no padding.
        return_tensors: None for lists, ``"np"`` for int64 arrays, always of two dimensions.

    Raises:
        InvalidParameterError: a text is none, or options contradict.
        InvalidTypeError: ``text`` or an option is of another type.
    """
    if padding not in _PADDINGS:
        raise _invalid("padding", padding, "must be True, False, 'longest' or 'max_length'")
    if truncation not in _TRUNCATIONS:
        rule = "must be True, False, 'longest_first', 'only_first' or 'do_not_truncate'"
        raise _invalid("truncation", truncation, rule)
    if return_tensors not in (None, "np"):
        raise _invalid("return_tensors", return_tensors, "must be None or 'np'")
    is_padded = padding not in (False, "do_not_pad")
    if truncation is None:
        is_cut = max_length is not None and not is_padded
    else:
        is_cut = truncation not in (False, "do_not_truncate")
    if max_length is not None:
        max_length = check_int("max_length", max_length, 0)
    elif is_cut or padding == "max_length":
        raise _invalid("max_length", max_length, "is needed to cut texts, or to pad to a length")
    is_single = isinstance(text, str)
    rows = [encode(one) for one in _texts(text)]
    if is_cut and max_length is not None:
        rows = [_cut(row, max_length, *ends) for row in rows]
    masks = [[1] * len(row) for row in rows]
    if is_padded:
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
    shape = len(rows), len(rows[0]) if rows else 0
    return Encoding(
        input_ids=np.array(rows, np.int64).reshape(shape),
        attention_mask=np.array(masks, np.int64).reshape(shape),
    )


def _texts(text: Any) -> list[Any]:
    if isinstance(text, str):
        return [text]
    if isinstance(text, bytes | Mapping) or not isinstance(text, Iterable):
        raise InvalidTypeError(
            f"text must be a string or a list of strings, got {type(text).__name__}",
            parameter="text",
            value=type(text),
        )
    return list(text)


def _cut(row: list[int], length: int, before: int, behind: int) -> list[int]:
    if len(row) <= length:
        return row
    if length < before + behind:
        raise _invalid("max_length", length, f"must be at least {before + behind}")
    return row[: length - behind] + row[len(row) - behind :]


def _invalid(name: str, value: object, rule: str) -> InvalidParameterError:
    return InvalidParameterError(f"{name} {rule}, got {value!r}", parameter=name, value=value)
