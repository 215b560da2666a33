"""P03: stop strings count behind a model's thoughts only, however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tellin.engine.detokenizer import Detokenizer
from tellin.engine.stop_strings import ThoughtGate
from tellin.engine.token_table import TokenTable
from tellin.exceptions import InvalidParameterError
from tellin.sampling_params import SamplingParams
from tests.engine.tokenizers_for_tests import get

MARKS = ("<think>", "</think>")
CASES = [  # opening, text, how much of it is not searched
    ("<think>", "<think>a</think>b", 16),
    ("<think>", " \n<think>a</think>\n\nb", 20),
    ("<think>", "no thoughts </think>", 0),
    ("<think>", "<thin air", 0),
    ("<think>", "<think>never ends", 17),
    ("", "a</think>b</think>", 9),
    ("", "</think>", 8),
    ("", "< /think></thin</think>x", 23),
]


@pytest.mark.parametrize(("opening", "text", "num_free"), CASES)
def test_every_way_to_cut_a_text(opening: str, text: str, num_free: int) -> None:
    for cut in range(len(text) + 1):
        for pieces in ([text[:cut], text[cut:]], list(text)):
            gate = ThoughtGate(opening, "</think>")
            shown = searched = ""
            for piece in pieces:
                if gate.is_open:
                    searched += piece
                    continue
                free, rest = gate.split(piece)
                assert not (free and searched)
                shown, searched = shown + free, searched + rest
            shown += gate.finish()
            assert (shown, searched) == (text[:num_free], text[num_free:])


TEXTS = st.lists(
    st.sampled_from(["<think>", "</think>", "STOP", "<", "S", "\n", " ", "a"]), max_size=12
).map("".join)


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, starts_inside=st.booleans(), cuts=st.lists(st.integers(1, 5), max_size=30))
def test_any_text_in_any_pieces(text: str, starts_inside: bool, cuts: list[int]) -> None:
    """The shown text is that up to the first stop string behind the thoughts."""
    tokenizer = get("byte_level")
    ids = tokenizer.encode(text, add_special_tokens=False)
    marks = ("" if starts_inside else MARKS[0], MARKS[1])
    params = SamplingParams(stop=["STOP"], stop_outside=marks, skip_special_tokens=False)
    detokenizer = Detokenizer.from_request(TokenTable(tokenizer), params, [])  # type: ignore[arg-type]
    shown, stop = "", None
    while stop is None:
        step, ids = ids[: (cuts or [1])[0]], ids[(cuts or [1])[0] :]
        cuts = cuts[1:]
        stop = detokenizer.update(step, finished=not ids)
        shown += detokenizer.next_text(delta=True)
        if not ids:
            break
    begin = 0
    if starts_inside or text.lstrip().startswith(MARKS[0]):
        first = 0 if starts_inside else text.index(MARKS[0]) + len(MARKS[0])
        end = text.find(MARKS[1], first)
        begin = len(text) if end < 0 else end + len(MARKS[1])
    found = text.find("STOP", begin)
    assert shown == (text if found < 0 else text[:found])
    assert (stop is None) == (found < 0)


@pytest.mark.parametrize("value", ["ab", ("a",), ("a", ""), (1, "b"), 5])
def test_wrong_marks(value: object) -> None:
    with pytest.raises(InvalidParameterError, match="stop_outside"):
        SamplingParams(stop_outside=value)  # type: ignore[arg-type]
