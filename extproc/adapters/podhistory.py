"""The listings of pods, and their changes.

1. The listing is the truth: neither a call that succeeded nor one that failed says what a pod has.
2. A listing from before the end of an unload does not count for the unloaded adapter. A listing is
   ignored after a later one.
3. A pod has restarted if its process started at another time; where that is unknown, if names are
   gone that we did not unload. All knowledge of it is forgotten then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import inf

from msgspec import Struct

from extproc.adapters.adapterstates import Failure
from extproc.pods.podstate import PodState
from extproc.types import ModelCard

RESTART_TOLERANCE_S = 1.0
"""Start times of one process are equal up to float printing."""
MINUTE_S = 60.0
BURST_RATIO = 0.25
"""Part of a minute's loads that may be made at once. Were it all of them, what is asked for next
would wait for the rest of the minute. A fleet that begins cold misses least so
(docs/archive/lab-evaluation.md)."""


class Window:
    """The starts of the last minute: some at once, then at an even pace."""

    def __init__(self) -> None:
        self._starts: deque[float] = deque()

    def start(self, now: float) -> None:
        """Count one."""
        self._starts.append(now)

    def free_s(self, limit: int, *, now: float) -> float:
        """Return when there is room for one more; a time that has passed for at once."""
        while self._starts and self._starts[0] <= now - MINUTE_S:
            self._starts.popleft()
        num = len(self._starts)
        if num < limit * BURST_RATIO:
            return -inf
        next_s = self._starts[-1] + MINUTE_S / limit
        return next_s if num < limit else max(next_s, self._starts[num - limit] + MINUTE_S)


class Seen(Struct, frozen=True):
    """The changes at a pod.

    Attributes:
        changed: Names that it lists anew, no longer, or with another root; all if it went or came.
        left: Names that it said are unloaded, and lists no longer.
        lied: Names that it said are unloaded, and still lists.
        is_back: It is up again, or new.
    """

    changed: set[str]
    left: list[str]
    lied: list[str]
    is_restarted: bool
    is_back: bool


class PodHistory:
    """One pod.

    Attributes:
        listed: The root of each adapter that it lists.
        since: When each was seen first.
        bases: Names and roots of its base models.
        is_known: It has listed its models since it started.
        verifying: Loaded, and not listed yet: until when to wait for that.
        leaving: Being unloaded now.
        starts: Of loads that began while it had requests.
        checks: Of checks of adapters' effects, likewise.
        mute_until_s: Until when it counts as one that cannot check any adapter.
        refusal: Why it loads nothing, and until when that is believed.
        full_since_s: Since when a running adapter has every slot; inf while one is free or idle.
        epoch: Grows with each restart.
    """

    __slots__ = (
        *("bases", "checks", "epoch", "full_since_s", "is_known", "leaving", "listed"),
        *("mute_until_s", "refusal", "since", "starts", "state", "verifying"),
        *("_effects", "_listed_at_s", "_models", "_unloaded"),
    )

    def __init__(self, address: str) -> None:
        self.state = PodState(address, is_up=False)
        self.epoch = 0
        self.starts, self.checks = Window(), Window()
        self.leaving = ""
        self.full_since_s = inf
        self._listed_at_s = -inf
        self._forget()

    def _forget(self) -> None:
        """Begin anew: it has restarted."""
        self.epoch += 1
        self.listed: dict[str, str] = {}
        self.since: dict[str, float] = {}
        self.bases: frozenset[str] = frozenset()
        self.is_known = False
        self._models: Mapping[str, ModelCard] | None = None
        self._forget_calls()

    def _forget_calls(self) -> None:
        self.verifying: dict[str, float] = {}
        self._effects: dict[str, tuple[str, bool]] = {}
        self.mute_until_s = -inf
        self.refusal: tuple[Failure, str, float] | None = None
        self._unloaded: dict[str, float] = {}

    @property
    def is_usable(self) -> bool:
        """Requests can be sent to it for what it lists."""
        return self.state.is_up and self.is_known

    def has_place(self, ratio: float = 1) -> bool:
        """Return whether it keeps one more adapter in its memory, or in so many times of that,
        beside what it lists.
        """
        places = self.state.max_cpu_loras
        coming = sum(name not in self.listed for name in self.verifying)
        return places is None or len(self.listed) + coming < ratio * places

    def has_left(self, name: str | None) -> bool:
        """Return whether an adapter is being unloaded, or was since the last listing."""
        return name is not None and (name == self.leaving or name in self._unloaded)

    def unloaded(self, name: str, *, now: float) -> None:
        """It says that it has unloaded an adapter."""
        self.listed = {each: root for each, root in self.listed.items() if each != name}
        self._unloaded[name] = now
        self._effects.pop(name, None)

    def loaded(self, name: str, *, until_s: float) -> None:
        """It says that it has loaded an adapter: to be listed until then."""
        self._effects.pop(name, None)
        self.verifying[name] = until_s

    def checked(self, name: str, root: str, *, has_effect: bool) -> None:
        """It has shown whether an adapter, listed with that root, has an effect there."""
        self._effects[name] = root, has_effect
        self.mute_until_s = -inf

    def effect(self, name: str) -> bool | None:
        """Return whether what it has under a name has an effect there; None where that is
        unknown.
        """
        root, has_effect = self._effects.get(name, ("", None))
        return has_effect if root == self.listed.get(name, "") else None

    def has_long_news(self, state: PodState, most: int) -> bool:
        """Return whether what is known now has a new list of more than so many models, of the same
        process."""
        models = state.models
        is_new = models is not None and models is not self._models and self.is_known
        return is_new and len(models or ()) > most and not self._is_other(state)

    def _is_other(self, state: PodState) -> bool:
        return _is_restart(self.state.process, state.process)

    def without_effect(self) -> list[str]:
        """Return the names under which it has what has no effect there."""
        return [name for name in self._effects if self.effect(name) is False]

    def see(self, state: PodState, *, now: float) -> Seen:
        """Take what is known now."""
        was_usable, names, is_restarted = self.is_usable, self.listed, self._is_other(state)
        self.state = state
        if is_restarted:
            self._forget()
        left: list[str] = []
        lied: list[str] = []
        if state.models is None:
            self.listed, self.is_known, self._models = {}, False, None
        elif state.listed_at_s > self._listed_at_s or (
            state.listed_at_s == self._listed_at_s and not is_restarted
        ):
            for name in self._settled(state.listed_at_s):
                (lied if name in state.models else left).append(name)
            is_restarted |= self._read(state.models, now=now)
        is_full = state.max_loras is not None and len(state.pending_by_adapter) >= state.max_loras
        self.full_since_s = min(self.full_since_s, now) if is_full else inf
        changed: set[str] = set()
        if self.listed is not names:
            listed = self.listed
            moved = [
                name for name, root in names.items() if name in listed and listed[name] != root
            ]
            changed = (names.keys() ^ self.listed.keys()).union(moved)
        if self.is_usable is not was_usable:
            changed |= self.listed.keys()
        return Seen(changed, left, lied, is_restarted, self.is_usable and not was_usable)

    def _settled(self, asked_at_s: float) -> list[str]:
        """Return what was unloaded before a listing, which is believed about it from now on."""
        self._listed_at_s = asked_at_s
        settled = [name for name, since_s in self._unloaded.items() if asked_at_s >= since_s]
        for name in settled:
            del self._unloaded[name]
            self._models = None  # to be read again
        return settled

    def _read(self, models: Mapping[str, ModelCard], *, now: float) -> bool:
        """Take a listing; return whether it alone shows that the pod has restarted."""
        if models is self._models and self.is_known:
            return False
        listed = {
            name: card.root
            for name, card in models.items()
            if card.parent is not None and name not in self._unloaded
        }
        bases = {
            each for card in models.values() if card.parent is None for each in (card.id, card.root)
        }
        lost = self.listed.keys() - listed.keys()
        is_restarted = bool(lost - {self.leaving}) and self.state.process is None
        if is_restarted:
            self.epoch += 1
            self._forget_calls()
        for name in self.since.keys() - listed.keys():
            del self.since[name]
        self.since |= dict.fromkeys(listed.keys() - self.since.keys(), now)
        if not self.state.is_resolver:  # what comes back may be another one
            self._effects = {name: each for name, each in self._effects.items() if name in listed}
        if listed != self.listed:
            self.listed = listed
        if bases != self.bases:
            self.bases = frozenset(bases)
        self.is_known, self._models = True, models
        return is_restarted


def _is_restart(before: float | None, after: float | None) -> bool:
    return before is not None and after is not None and abs(after - before) > RESTART_TOLERANCE_S
