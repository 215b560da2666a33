"""Plans that end with hidden states: rule 9.2.3."""

from __future__ import annotations

import numpy as np
import pytest

from tellin.kernels.native import NativeBackend
from tellin.kernels.reference import ReferenceBackend
from tellin.models import build_plan
from tellin.models.plan import ir
from tests.models.stepping import Stepper
from tests.models.tiny import CASES, MAX_MODEL_LEN, memory_source, tiny_arrays, tiny_token_ids


def hidden_of(backend: NativeBackend | ReferenceBackend) -> np.ndarray:
    Stepper(backend).step([("only", [int(i) for i in tiny_token_ids()])])
    return np.array(backend.hidden())


@pytest.mark.parametrize("name", CASES)
def test_hidden_states_are_those_of_the_whole_model(name: str) -> None:
    """The same bits without the head; the model's file need not even have one."""
    length = MAX_MODEL_LEN.get(name)
    arrays = tiny_arrays(name)
    whole = build_plan(memory_source(CASES[name], arrays), max_model_len=length)
    headless = {key: value for key, value in arrays.items() if key != "lm_head.weight"}
    source = memory_source(CASES[name], headless)
    plan = build_plan(source, max_model_len=length, pooling=True)
    assert plan.output == plan.hidden
    assert plan.output.width == CASES[name].hidden_size
    assert not any(isinstance(op, ir.Softcap) for op in plan.ops)
    for kind in (NativeBackend, ReferenceBackend):
        assert (hidden_of(kind(plan)) == hidden_of(kind(whole))).all()
