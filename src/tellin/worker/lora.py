"""LoRA adapters of a worker: which are loaded, and which of them lie in the backend's slots.

Two stores. The registry holds adapters as read from disk, least recently used first; slots hold
those that steps use. An adapter that a live request needs is never dropped, whatever the limits,
so no step ever reads a file. The manager knows no schedule: the core says what is in use.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from tellin.config import LoRAConfig
from tellin.exceptions import AdapterCapacityError, AdapterError, EngineError

if TYPE_CHECKING:
    from tellin.loading.lora import Adapter
    from tellin.protocol import LoRARequest

logger = logging.getLogger("tellin.worker")

Floats = npt.NDArray[np.float32]


class AdapterBackend(Protocol):
    """What the manager needs of a backend."""

    def set_adapter(self, slot: int, weights: Mapping[str, tuple[Floats, Floats]]) -> None: ...

    def clear_adapter(self, slot: int) -> None: ...


@dataclass(frozen=True)
class _Loaded:
    request: LoRARequest
    adapter: Adapter


class LoRAManager:
    """Loads adapters for one model and puts them into its backend's slots.

    Args:
        config: limits.
        model_path: of the base model, for its hyperparameters.
        sites: ``Plan.lora_sites`` of the base model.
    """

    def __init__(
        self, config: LoRAConfig, model_path: Path, sites: Mapping[str, tuple[int, int]]
    ) -> None:
        self.config = config
        self._model_path = model_path
        self._sites = sites
        self._loaded: OrderedDict[int, _Loaded] = OrderedDict()  # by id
        self._pinned: set[int] = set()
        self._slot_of: OrderedDict[int, int] = OrderedDict()  # by id, least recently used first
        self.version = 0
        """Changes whenever what a slot holds may have."""

    # ------------------------------------------------------------------ the registry

    def add(
        self, request: LoRARequest, backend: AdapterBackend | None, in_use: Collection[int] = ()
    ) -> bool:
        """Load an adapter; one that is loaded counts as just used.

        Args:
            backend: None while the base model's weights are put away.
            in_use: ids of adapters that live requests need.

        Raises:
            AdapterNotFoundError: there is none at its path.
            AdapterError: it cannot be used, or its name or id belongs to another one.
            AdapterCapacityError: all that are loaded are pinned. Nothing has changed, as ever when
                this raises.
        """
        lora_id = request.lora_int_id
        known = self._check_identity(request)
        if known is not None:
            if not request.load_inplace:
                self._loaded.move_to_end(lora_id)
                self._shrink({*in_use, lora_id}, backend)
                return True
            if lora_id in in_use:
                raise AdapterError(
                    f"LoRA adapter {request.lora_name!r} is used by requests in progress; it can "
                    "be loaded anew when they have ended"
                )
        is_full = known is None and len(self._loaded) >= self.config.max_cpu_loras
        if is_full and self._pinned.issuperset(self._loaded):
            raise AdapterCapacityError(
                f"all {len(self._loaded)} loaded LoRA adapters are pinned; remove one, or raise "
                "max_cpu_loras"
            )
        adapter = self._load(request)
        if known is not None:
            self._vacate(lora_id, backend)
        self._loaded[lora_id] = _Loaded(request, adapter)
        self._loaded.move_to_end(lora_id)
        self._shrink({*in_use, lora_id}, backend)
        return True

    def remove(self, lora_id: int, backend: AdapterBackend | None) -> bool:
        """Drop an adapter; False if it is not loaded."""
        if self._loaded.pop(lora_id, None) is None:
            return False
        self._pinned.discard(lora_id)
        self._vacate(lora_id, backend)
        return True

    def pin(self, lora_id: int) -> bool:
        """Keep an adapter loaded until it is removed.

        Raises:
            AdapterError: it is not loaded.
        """
        if lora_id not in self._loaded:
            raise AdapterError(f"there is no loaded LoRA adapter with id {lora_id} to pin")
        self._pinned.add(lora_id)
        return True

    def list(self) -> list[int]:
        """Ids of loaded adapters, least recently used first."""
        return list(self._loaded)

    def _check_identity(self, request: LoRARequest) -> LoRARequest | None:
        """The adapter that is loaded under this name and id."""
        for loaded in self._loaded.values():
            known = loaded.request
            same_id = known.lora_int_id == request.lora_int_id
            same_name = known.lora_name == request.lora_name
            if same_id != same_name:
                raise AdapterError(
                    f"LoRA adapter {request.lora_name!r} with id {request.lora_int_id} contradicts "
                    f"the loaded {known.lora_name!r} with id {known.lora_int_id}: a name has one "
                    "id; remove the loaded one first"
                )
            if same_id and known.lora_path != request.lora_path and not request.load_inplace:
                raise AdapterError(
                    f"LoRA adapter {request.lora_name!r} is loaded from {known.lora_path}, not "
                    f"{request.lora_path}; set load_inplace=True to load it anew"
                )
            if same_id:
                return known
        return None

    def _load(self, request: LoRARequest) -> Adapter:
        from tellin.loading import open_metadata
        from tellin.loading.lora import load_adapter

        adapter = load_adapter(
            Path(request.lora_path),
            open_metadata(self._model_path).hparams,
            self._sites,
            self.config.max_lora_rank,
        )
        logger.info(
            "LoRA adapter %s: %d layers, %d bytes, from %s",
            request.lora_name,
            len(adapter.weights),
            adapter.num_bytes,
            request.lora_path,
        )
        return adapter

    def _shrink(self, needed: set[int], backend: AdapterBackend | None) -> None:
        """Drop what has not been used for longest, down to the limit if that is possible."""
        for lora_id in list(self._loaded):
            if len(self._loaded) <= self.config.max_cpu_loras:
                return
            if lora_id not in needed and lora_id not in self._pinned:
                self.remove(lora_id, backend)

    # ------------------------------------------------------------------ slots

    def activate(self, lora_ids: set[int], backend: AdapterBackend) -> dict[int, int]:
        """Slots of the adapters of a step, by id; those that are not loaded are left out.

        Raises:
            EngineError: there are more than slots.
        """
        if len(lora_ids) > self.config.max_loras:
            raise EngineError(
                f"a step has {len(lora_ids)} LoRA adapters, but max_loras is "
                f"{self.config.max_loras}"
            )
        wanted = [lora_id for lora_id in sorted(lora_ids) if lora_id in self._loaded]
        for lora_id in wanted:
            if lora_id not in self._slot_of:
                slot = self._free_slot(lora_ids)
                backend.set_adapter(slot, self._loaded[lora_id].adapter.weights)
                self._slot_of[lora_id] = slot
                self.version += 1
            self._slot_of.move_to_end(lora_id)
            self._loaded.move_to_end(lora_id)
        return {lora_id: self._slot_of[lora_id] for lora_id in wanted}

    def forget_slots(self) -> None:
        """The backend is a new one, with empty slots."""
        self._slot_of.clear()
        self.version += 1

    def _free_slot(self, needed: set[int]) -> int:
        """The lowest empty slot, or that of the adapter whose last use is longest ago."""
        taken = set(self._slot_of.values())
        for slot in range(self.config.max_loras):
            if slot not in taken:
                return slot
        idle = [lora_id for lora_id in self._slot_of if lora_id not in needed]
        victim = min(idle, key=lambda lora_id: lora_id in self._pinned)
        return self._slot_of.pop(victim)

    def _vacate(self, lora_id: int, backend: AdapterBackend | None) -> None:
        slot = self._slot_of.pop(lora_id, None)
        if slot is not None:
            self.version += 1
            if backend is not None:
                backend.clear_adapter(slot)
