"""When a drafter works within a step: it sees what the target has computed, and drafts at the end.

Whose drafts are wanted, and how many, the scheduler says; `Drafter` is who makes them.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from tellin.kernels.batch import StepBatch
from tellin.step_protocol import ModelRunnerOutput, SchedulerOutput
from tellin.worker.backends import Backend
from tellin.worker.input_batch import RequestState
from tellin.worker.spec_decode import Drafter

Int32Array = npt.NDArray[np.int32]


def follow(drafter: Drafter | None, slots: Int32Array, step: StepBatch, backend: Backend) -> None:
    """Show a drafter that wants them the hidden states of the pass that has just run."""
    if drafter is not None and drafter.needs_hidden and len(slots):
        drafter.follow(slots, step, backend.hidden())


def draft(
    drafter: Drafter, step: SchedulerOutput, states: list[RequestState], output: ModelRunnerOutput
) -> None:
    """Draft for requests that got an id and go on, if drafts are wanted.

    ``output`` gets the drafts, and what they took. A drafter that follows the target reads in any
    case; with no drafts, that is all the time that is reported.
    """
    num_drafts = step.num_spec_tokens_to_schedule
    if (num_drafts == 0 or not states) and not drafter.needs_hidden:
        return
    started = time.perf_counter()
    limits = [step.spec_token_limits.get(state.req_id, num_drafts) for state in states]
    if 0 in limits:
        states = [state for state, limit in zip(states, limits, strict=True) if limit]
        limits = [limit for limit in limits if limit]
    slots = np.array([state.slot for state in states], np.int32)
    drafts = drafter.propose(slots, np.array(limits, np.int32))
    output.draft_token_ids = {
        state.req_id: ids for state, ids in zip(states, drafts, strict=True) if ids
    }
    output.draft_time_s = time.perf_counter() - started
