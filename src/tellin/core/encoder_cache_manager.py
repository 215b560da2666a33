"""Which encoder outputs the workers keep: counts of rows by identifier, and who refers to them.

The rows themselves lie with the workers, which drop exactly what `take_freed` names. An entry that
nobody refers to stays until its room is needed, the longest unused first. Knows nothing of steps
or budgets: those are `tellin.core.encoder_inputs`' business.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tellin.core.request import Request


@dataclass
class _Entry:
    num_embeds: int
    num_computed: int = 0  # rows from the first on that some step has asked for
    users: dict[str, Request] = field(default_factory=dict)


class EncoderCacheManager:
    """Room for ``cache_size`` embedding rows.

    ``num_free_slots`` is what no entry holds; ``num_freeable_slots`` adds what entries without
    users hold.
    """

    def __init__(self, cache_size: int) -> None:
        self.cache_size = cache_size
        self.num_free_slots = cache_size
        self.num_freeable_slots = cache_size
        self._entries: dict[str, _Entry] = {}
        self._freeable: dict[str, None] = {}  # without users, the longest unused first
        self._held: dict[str, set[str]] = {}  # by request: identifiers that it refers to
        self._freed: dict[str, None] = {}

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._entries

    def use(self, request: Request, identifier: str) -> bool:
        """Refer to an entry; False if there is none."""
        entry = self._entries.get(identifier)
        if entry is None:
            return False
        if not entry.users:
            del self._freeable[identifier]
            self.num_freeable_slots -= entry.num_embeds
        self._refer(entry, request, identifier)
        return True

    def num_new(self, identifier: str, row: int, count: int) -> int:
        """How many of these rows no step has asked for yet, as far as is known."""
        entry = self._entries.get(identifier)
        return max(0, row + count - max(row, entry.num_computed if entry else 0))

    def note_computed(self, identifier: str, row: int, count: int) -> None:
        """A step asks for these rows. What does not follow the rows before is not noted."""
        entry = self._entries[identifier]
        if row <= entry.num_computed:
            entry.num_computed = max(entry.num_computed, row + count)

    def make_room(self, num_embeds: int) -> bool:
        """Whether ``num_embeds`` rows fit, after dropping entries without users if need be."""
        if num_embeds > self.num_freeable_slots:
            return False
        while num_embeds > self.num_free_slots:
            self._remove(next(iter(self._freeable)))
        return True

    def allocate(self, request: Request, identifier: str, num_embeds: int) -> None:
        """A new entry with its first user. Call `make_room` before.

        Raises:
            ValueError: it exists, or does not fit.
        """
        if identifier in self._entries or num_embeds > self.num_free_slots:
            raise ValueError(f"an entry of {num_embeds} rows cannot be added")
        entry = self._entries[identifier] = _Entry(num_embeds)
        self.num_free_slots -= num_embeds
        self.num_freeable_slots -= num_embeds
        self._refer(entry, request, identifier)

    def _refer(self, entry: _Entry, request: Request, identifier: str) -> None:
        entry.users[request.request_id] = request
        self._held.setdefault(request.request_id, set()).add(identifier)

    def held(self, request: Request) -> frozenset[str]:
        """Identifiers that a request refers to."""
        return frozenset(self._held.get(request.request_id, ()))

    def other_user(self, identifier: str, request: Request) -> Request | None:
        """Somebody besides ``request`` who refers to an entry."""
        users = self._entries[identifier].users
        return next((u for i, u in users.items() if i != request.request_id), None)

    def release(self, request: Request, identifier: str) -> None:
        """Drop a reference; the entry stays for others to come. Nothing if it has none."""
        held = self._held.get(request.request_id)
        if held is None or identifier not in held:
            return
        held.remove(identifier)
        if not held:
            del self._held[request.request_id]
        entry = self._entries[identifier]
        del entry.users[request.request_id]
        if not entry.users:
            self._freeable[identifier] = None
            self.num_freeable_slots += entry.num_embeds

    def release_all(self, request: Request) -> None:
        """Drop all references of a request. Idempotent."""
        for identifier in sorted(self._held.get(request.request_id, ())):
            self.release(request, identifier)

    def discard(self, identifier: str) -> None:
        """Drop an entry whatever refers to it: its rows are not (or no longer) there."""
        entry = self._entries.get(identifier)
        if entry is None:
            return
        for request in list(entry.users.values()):
            self.release(request, identifier)
        self._remove(identifier)

    def _remove(self, identifier: str) -> None:
        self._freed[identifier] = None
        entry = self._entries.pop(identifier)
        del self._freeable[identifier]
        self.num_free_slots += entry.num_embeds

    def reset(self) -> None:
        """Drop everything, whatever state an interrupt has left it in."""
        self._freed |= dict.fromkeys(self._entries)
        self._entries, self._freeable, self._held = {}, {}, {}
        self.num_free_slots = self.num_freeable_slots = self.cache_size

    def take_freed(self) -> list[str]:
        """What was dropped since the last call, for the workers."""
        freed, self._freed = list(self._freed), {}
        return freed

    def put_back_freed(self, identifiers: list[str]) -> None:
        """The workers may not have heard of these: they are told again."""
        self._freed = dict.fromkeys(identifiers) | self._freed

    def check(self, live: set[str]) -> None:
        """Recount everything; raises AssertionError. ``live``: requests that may refer."""
        used = sum(e.num_embeds for e in self._entries.values() if e.users)
        idle = sum(e.num_embeds for e in self._entries.values() if not e.users)
        assert self.num_free_slots == self.cache_size - used - idle, "encoder cache: free rows"
        assert self.num_freeable_slots == self.cache_size - used, "encoder cache: freeable rows"
        assert self.num_free_slots >= 0, "encoder cache: more rows than room"
        unused = {i for i, e in self._entries.items() if not e.users}
        assert self._freeable.keys() == unused, "encoder cache: freeable entries"
        held: dict[str, set[str]] = {}
        for identifier, entry in self._entries.items():
            for request_id in entry.users:
                held.setdefault(request_id, set()).add(identifier)
        assert held == self._held, "encoder cache: references"
        assert held.keys() <= live, "encoder cache: users that do not run"
