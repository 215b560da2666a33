"""``n`` completions of one prompt: one parent, n independent child requests.

Owns ids, parameters and the collected results of the children. The core never hears of parents.
"""

from __future__ import annotations

from tellin.exceptions import TellinError
from tellin.outputs import CompletionOutput
from tellin.protocol import EngineCoreRequest
from tellin.sampling_params import RequestOutputKind, SamplingParams


class ParentRequest:
    """The request that the user made; lives until its last child has ended."""

    def __init__(self, request: EngineCoreRequest) -> None:
        """``request`` has both its ids assigned, and sampling params."""
        if request.external_req_id is None or request.sampling_params is None:
            raise RuntimeError("a parent request needs an external id and sampling params")
        self.request_id = request.request_id
        self.external_req_id = request.external_req_id
        self.sampling_params = request.sampling_params
        self.child_requests: set[str] = set()
        self.max_num_generation_tokens = 0
        self.error: TellinError | None = None
        self._shared_child_params: SamplingParams | None = None
        self._is_final_only = self.sampling_params.output_kind == RequestOutputKind.FINAL_ONLY
        self._completions: dict[int, CompletionOutput] = {}

    @property
    def n(self) -> int:
        return self.sampling_params.n

    def get_child_info(self, index: int) -> tuple[str, SamplingParams]:
        """Id and parameters of child ``index``, which is live from now on.

        Without a seed all children share one parameters object; child i of seed s has seed s + i.
        """
        child_id = f"{index}_{self.request_id}"
        self.child_requests.add(child_id)
        return child_id, self._child_params(index)

    def _child_params(self, index: int) -> SamplingParams:
        seed = self.sampling_params.seed
        if seed is None and self._shared_child_params is not None:
            return self._shared_child_params
        params = self.sampling_params.clone()
        params.n = 1
        if seed is None:
            self._shared_child_params = params
        else:
            params.seed = (seed + index) % 2**64  # wraps like the 64-bit key that it becomes
        return params

    def drop_child(self, child_id: str) -> None:
        """The child has ended or was never started."""
        self.child_requests.discard(child_id)

    def observe_num_generation_tokens(self, num_generation_tokens: int) -> None:
        """A child has ended with that many tokens."""
        self.max_num_generation_tokens = max(self.max_num_generation_tokens, num_generation_tokens)

    def add_completion(
        self, child_id: str, completion: CompletionOutput
    ) -> tuple[list[CompletionOutput], bool]:
        """Take a child's output.

        Returns:
            The completions to hand out now (streaming: this one; final only: all, in order of their
            index, when the last child has ended, nothing before), and whether the parent has ended.
        """
        if completion.finished():
            self.drop_child(child_id)
        finished = not self.child_requests
        if not self._is_final_only:
            return [completion], finished
        self._completions[completion.index] = completion
        if not finished:
            return [], False
        return [self._completions[index] for index in sorted(self._completions)], True
