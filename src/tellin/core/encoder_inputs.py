"""Which images a step encodes: fits a request's share of a step to the encoder's budget and cache.

An item is scheduled whole, in the step that first computes one of its positions, and its rows stay
cached until the request is past them. Workers encode its parts as their positions are computed, and
a step computes few enough of them that the decodes of others need not wait for a whole item. An
item that two requests share is encoded once. What does not fit cuts the share before it; text never
waits for room that it does not need. Where rows of a part see each other, no share ends among them.
"""

from __future__ import annotations

from tellin.config import MultiModalConfig
from tellin.core.encoder_cache_manager import EncoderCacheManager
from tellin.core.request import Request
from tellin.core.step_plan import StepPlan
from tellin.exceptions import ContextLengthError, InvalidParameterError
from tellin.protocol import MultiModalFeature


class EncoderInputs:
    """Plans the encoder's work. Without a configuration every item is refused.

    Args:
        cuts_prompts: whether prompts may take several steps (chunked prefill).
    """

    def __init__(
        self,
        config: MultiModalConfig | None,
        cuts_prompts: bool = True,
        max_step_tokens: int | None = None,
    ) -> None:
        self.cache = EncoderCacheManager(config.encoder_cache_size if config else 0)
        self.step_budget = self.cache.cache_size
        if config is not None and cuts_prompts:
            # A step encodes no more than the largest item has: decodes wait for it.
            self.step_budget = min(config.max_tokens_per_item, self.cache.cache_size)
        self._cuts_prompts = cuts_prompts
        self._max_step_tokens = max_step_tokens
        self.rows_per_step = config.max_rows_per_step if config else None
        self._keeps_whole = config is not None and config.rows_see_each_other
        # Of the step that is planned or in flight: what it encodes, and tells the workers to drop.
        self._fresh: set[str] = set()
        self._freed: list[str] = []

    def check_admissible(self, request: Request) -> None:
        """Refuse what no step can encode.

        Raises:
            ContextLengthError: naming the item's size and the limit.
        """
        limit = self.step_budget
        if self._keeps_whole and self._max_step_tokens is not None:
            self._check_runs(request, self._max_step_tokens)
        for item in request.mm_features:
            if item.num_embeds > limit:
                raise ContextLengthError(
                    f"an item of modality {item.modality!r} takes {item.num_embeds} embeddings, "
                    f"but the encoder's cache holds {limit}; use a smaller one"
                )
        total = sum({i.identifier: i.num_embeds for i in request.mm_features}.values())
        if not self._cuts_prompts and total > limit:
            raise ContextLengthError(
                f"the prompt's items take {total} embeddings, but without chunked prefill a step "
                f"encodes at most {limit}; allow chunked prefill or send fewer"
            )

    def _check_runs(self, request: Request, limit: int) -> None:
        """Refuse rows that see each other and are more than a step computes."""
        for item in request.mm_features:
            longest = max(count for _, count in item.embed_runs or [(0, item.length)])
            if longest > limit:
                raise ContextLengthError(
                    f"an item of modality {item.modality!r} has {longest} tokens that see each "
                    f"other, but a step computes at most {limit} (max_num_batched_tokens)"
                )

    # ------------------------------------------------------------------ planning a step

    def begin_step(self, plan: StepPlan) -> None:
        plan.encoder_budget = self.step_budget
        plan.num_encoder_rows = 0
        self._fresh.clear()
        self._freed = []

    def take_freed(self) -> list[str]:
        """What the workers are to drop before they encode anything in this step."""
        self._freed = self.cache.take_freed()
        return self._freed

    def fit(self, request: Request, start: int, num_tokens: int, plan: StepPlan) -> int:
        """How many positions from ``start`` on this step can compute, at most ``num_tokens``.

        Items that are cached are referred to from now on; those that must be encoded are noted by
        `commit`, which must follow with what this returns, unless the request does not get its
        share (then `release_all` or a later step decides).
        """
        num_tokens = self._fit_rows(request, start, num_tokens, plan)
        new_embeds = 0
        chosen: set[str] = set()
        for item in request.mm_features:
            if item.offset >= start + num_tokens:
                break
            if not item.embeds_in(start, start + num_tokens) or item.identifier in chosen:
                continue
            if self.cache.use(request, item.identifier):
                continue
            wanted = new_embeds + item.num_embeds
            if wanted > plan.encoder_budget or not self.cache.make_room(wanted):
                return max(0, item.offset - start)
            new_embeds = wanted
            chosen.add(item.identifier)
        return num_tokens

    def without_cuts(self, request: Request, start: int, num_tokens: int, budget: int) -> int:
        """A share that ends in no row of rows that see each other, at most ``budget`` tokens.

        The nearest end before; where the share begins with such rows, behind them. `fit` may
        lessen it further.
        """
        part = self._part_at(request, start + num_tokens)
        if part is None:
            return num_tokens
        first, end = part
        if first > start:
            return first - start
        return end - start if end - start <= budget else 0

    def start_of_part(self, request: Request, position: int) -> int:
        """Where the rows begin that would be cut at ``position``; the position if none would."""
        part = self._part_at(request, position)
        return position if part is None else part[0]

    def _part_at(self, request: Request, position: int) -> tuple[int, int] | None:
        """Rows that see each other some of which lie before ``position``, others from there on."""
        if not self._keeps_whole:
            return None
        for item in request.mm_features:
            if item.offset < position < item.offset + item.length:
                for start, count in item.embed_runs or [(0, item.length)]:
                    first = item.offset + start
                    if first < position < first + count:
                        return first, first + count
        return None

    def _fit_rows(self, request: Request, start: int, num_tokens: int, plan: StepPlan) -> int:
        """The share without the runs that go beyond the rows of a step; one run always fits.

        Rows that an earlier step has made the workers encode cost nothing.
        """
        if self.rows_per_step is None:
            return num_tokens
        num_rows = plan.num_encoder_rows
        for item in request.mm_features:
            for position, row, count in item.embeds_in(start, start + num_tokens):
                num_new = self.cache.num_new(item.identifier, row, count)
                if num_rows and num_new and num_rows + num_new > self.rows_per_step:
                    return position - start
                num_rows += num_new
        return num_tokens

    def commit(self, request: Request, start: int, num_tokens: int, plan: StepPlan) -> None:
        """Allocate what the positions ``[start, start + num_tokens)`` need and nobody encoded."""
        for index, item in enumerate(request.mm_features):
            runs = item.embeds_in(start, start + num_tokens)
            if not runs:
                continue
            plan.num_encoder_rows += sum(
                self.cache.num_new(item.identifier, row, count) for _, row, count in runs
            )
            if self.cache.use(request, item.identifier):
                self._note_computed(item, runs)
                continue
            if not self.cache.make_room(item.num_embeds):
                raise RuntimeError("the encoder's cache has no room for what was found to fit")
            self.cache.allocate(request, item.identifier, item.num_embeds)
            self._fresh.add(item.identifier)
            plan.encoder_budget -= item.num_embeds
            plan.encoder_inputs.setdefault(request.request_id, []).append(index)
            self._note_computed(item, runs)

    def _note_computed(self, item: MultiModalFeature, runs: list[tuple[int, int, int]]) -> None:
        for _, row, count in runs:
            self.cache.note_computed(item.identifier, row, count)

    def take_out(self, request: Request, plan: StepPlan) -> None:
        """A request loses its share of the step: others encode what they share, or nobody does."""
        for index in plan.encoder_inputs.pop(request.request_id, ()):
            item = request.mm_features[index]
            heir = self.cache.other_user(item.identifier, request)
            if heir is None:
                self._discard_fresh(item.identifier)
                plan.encoder_budget += item.num_embeds
                continue
            same = [i for i, o in enumerate(heir.mm_features) if o.identifier == item.identifier]
            plan.encoder_inputs.setdefault(heir.request_id, []).append(same[0])

    def _discard_fresh(self, identifier: str) -> None:
        self.cache.discard(identifier)
        self._fresh.discard(identifier)

    # ------------------------------------------------------------------ results

    def release_unused(self, request: Request) -> None:
        """Keep references only to items of which some, but not all positions are computed.

        An item that comes again later is no exception: a request that held it meanwhile could wait
        for room that it takes itself.
        """
        held = self.cache.held(request)
        if not held:
            return
        done = request.num_computed_tokens
        needed = {
            i.identifier for i in request.mm_features if i.offset < done < i.offset + i.length
        }
        for identifier in sorted(held - needed):
            self.cache.release(request, identifier)

    def request_failed(self, request: Request, plan: StepPlan) -> None:
        """Its items may not have been encoded: they are not there for others."""
        for index in plan.encoder_inputs.get(request.request_id, ()):
            self._discard_fresh(request.mm_features[index].identifier)

    def step_failed(self) -> None:
        """The step did not run: nothing was encoded, and perhaps nothing dropped."""
        for identifier in sorted(self._fresh):
            self.cache.discard(identifier)
        self._fresh.clear()
        self.cache.put_back_freed(self._freed)

    def recover(self) -> None:
        """Begin anew after an interrupt in the middle of a step."""
        self.cache.reset()
        self._fresh.clear()
        self.cache.put_back_freed(self._freed)


def check_features(items: list[MultiModalFeature], num_prompt_tokens: int) -> None:
    """Refuse items that do not lie in the prompt, one after the other, or that have no data.

    Raises:
        InvalidParameterError: naming the first such item.
    """
    end = 0
    for index, item in enumerate(items):
        where = f"multimodal item {index}"
        runs = item.embed_runs or [(0, item.length)]
        position = 0
        for start, count in runs:
            if start < position or count < 1:
                raise InvalidParameterError(f"{where}: its runs {runs} are not in order")
            position = start + count
        if item.offset < end or position > item.length or item.length < 1:
            raise InvalidParameterError(
                f"{where} at {item.offset} of length {item.length} overlaps another, or its own end"
            )
        end = item.offset + item.length
        if end > num_prompt_tokens:
            raise InvalidParameterError(
                f"{where} ends at {end}, but the prompt has {num_prompt_tokens} tokens"
            )
        if item.data is None:
            raise InvalidParameterError(f"{where} has no data, and none is cached")
