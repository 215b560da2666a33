"""What a scheduler reports of itself after a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tellin.core.request import Request
from tellin.core.step_plan import StepPlan
from tellin.protocol import SchedulerStats
from tellin.step_protocol import ModelRunnerOutput

if TYPE_CHECKING:
    from tellin.core.scheduler import Scheduler


def make_stats(
    scheduler: Scheduler, plan: StepPlan, model_output: ModelRunnerOutput | None
) -> SchedulerStats:
    """State after a step; hands out what was counted since the previous call."""
    manager, room = scheduler.kv_cache_manager, scheduler.room
    stats = SchedulerStats(
        num_running_reqs=len(scheduler.running),
        num_waiting_reqs=len(room.waiting) + len(room.preempted),
        num_skipped_waiting_reqs=len(room.blocked),
        step_counter=scheduler.current_step,
        kv_cache_usage=manager.usage,
        prefix_cache_stats=manager.prefix_cache_stats.take(),
        num_scheduled_tokens=plan.num_total,
        num_prefill_tokens=_num_prefill_tokens(plan),
    )
    if manager.metrics is not None:
        stats.kv_cache_eviction_events = manager.metrics.take_events()
    if model_output is not None:
        stats.model_time_s = model_output.model_time_s
    stats.spec_decoding_stats = scheduler.results.spec.take_stats()
    if scheduler.config.lora_config is not None:
        stats.running_lora_adapters = _count_adapters(scheduler.running)
        stats.waiting_lora_adapters = _count_adapters(
            [*room.waiting, *room.preempted, *room.blocked.values()]
        )
    return stats


def _num_prefill_tokens(plan: StepPlan) -> int:
    scheduled = plan.num_scheduled_tokens
    in_progress = sum(scheduled.get(request.request_id, 0) for request in plan.prefills)
    return plan.num_admitted_tokens + in_progress


def _count_adapters(requests: Iterable[Request]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for request in requests:
        if request.lora_request is not None:
            name = request.lora_request.lora_name
            counts[name] = counts.get(name, 0) + 1
    return counts
