"""All pods: who lists what, which calls are on their way, what failed, and when to try again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from math import inf

from msgspec import Struct
from msgspec.structs import replace

from extproc.adapters.adapterstates import (
    OF_THE_POD,
    PASSING,
    Action,
    AdapterSettings,
    CallKind,
    Failure,
    Result,
)
from extproc.adapters.podhistory import PodHistory
from extproc.pods.podstate import PodState

SHARED_PAUSE_S = 15.0
"""The longest pause where several adapters in a row time out or do not show on a pod. The trouble
is the pod's then, and none of them should rest for long once that is over.
"""


LONG_LIST = 2_000
"""Adapters in a pod's list: of new lists that are longer, one is read in one go, which takes up to
5 ms with as many names as a list may have."""


class Attempt(Struct):
    """Failures in a row of one adapter on one pod."""

    kind: CallKind
    failure: Failure
    message: str
    num_failures: int
    next_s: float


class Attempts:
    """Failures by address and served name. A success or a change removes one."""

    def __init__(self) -> None:
        self._by_address: dict[str, dict[str, Attempt]] = {}
        self._troubled: dict[str, set[str]] = {}
        self._due: list[tuple[float, str]] = []
        self._num: Counter[tuple[str, Failure]] = Counter()

    def due(self, now: float) -> set[str]:
        """Return, once, the served names of which something may be tried again."""
        names = set()
        while self._due and self._due[0][0] <= now:
            names.add(heappop(self._due)[1])
        return names

    def due_s(self) -> float:
        """Return when `due` has something next; inf for never."""
        return self._due[0][0] if self._due else inf

    def of(self, address: str, served: str) -> Attempt | None:
        """Return what failed, None if nothing did."""
        return self._by_address.get(address, {}).get(served)

    def next_s(self, address: str, served: str, kind: CallKind) -> float:
        """Return when the next try may be; -inf for at any time."""
        attempt = self.of(address, served)
        return -inf if attempt is None or attempt.kind is not kind else attempt.next_s

    def fail(
        self,
        address: str,
        served: str,
        kind: CallKind,
        failure: Failure,
        message: str,
        *,
        settings: AdapterSettings,
        now: float,
        num_elsewhere: int = 0,
    ) -> None:
        """Count a failure, and so many on other pods that say the same of the adapter."""
        before = self.of(address, served)
        num = 1 + (before.num_failures if before and before.kind is kind else 0) + num_elsewhere
        doublings = min(num - 1, 32)
        pause_s = min(settings.backoff_min_s * 2**doublings, settings.backoff_max_s)
        if num >= settings.max_failures:
            pause_s = settings.rest_s
        if failure in PASSING:
            troubled = self._troubled.setdefault(address, set())
            troubled.add(served)
            if len(troubled) > 1:
                pause_s = min(pause_s, SHARED_PAUSE_S)
        attempt = Attempt(kind, failure, message, num - num_elsewhere, now + pause_s)
        self.forget(address, served)
        self._by_address.setdefault(address, {})[served] = attempt
        self._num[address, failure] += 1
        heappush(self._due, (attempt.next_s, served))

    def succeed(self, address: str, served: str) -> None:
        """Forget what failed: the pod holds it, and so is not in trouble."""
        self._troubled.pop(address, None)
        self.forget(address, served)

    def num_without_effect(self, served: str, *, except_at: str) -> int:
        """Return how often other pods found an adapter to have no effect."""
        found = [each.get(served) for at, each in self._by_address.items() if at != except_at]
        return sum([a.num_failures for a in found if a and a.failure is Failure.NO_EFFECT])

    def forget(self, address: str, served: str) -> None:
        """Forget what failed."""
        attempt = self._by_address.get(address, {}).pop(served, None)
        if attempt is not None:
            self._num[address, attempt.failure] -= 1

    def forget_name(self, served: str) -> None:
        """Try an adapter at once, everywhere."""
        for address in self._by_address:
            self.forget(address, served)

    def forget_pod(self, address: str) -> Iterable[str]:
        """Try all adapters at once on a pod; return which failed there."""
        self._troubled.pop(address, None)
        attempts = self._by_address.pop(address, {})
        self._num.subtract((address, each.failure) for each in attempts.values())
        return attempts

    def forget_passing(self, address: str) -> Iterable[str]:
        """The same for those whose failures may have been the pod's."""
        self._troubled.pop(address, None)
        attempts = self._by_address.get(address, {})
        passing = [name for name, each in attempts.items() if each.failure in PASSING]
        for name in passing:
            self.forget(address, name)
        return passing

    def keep(self, addresses: Iterable[str]) -> None:
        """Forget all pods but these."""
        for address in self._by_address.keys() - set(addresses):
            self.forget_pod(address)

    def counts(self) -> Counter[tuple[str, Failure]]:
        """Return the number of adapters by address and reason."""
        self._num = +self._num
        return self._num.copy()


class _Call(Struct, frozen=True):
    """A call on its way, to the process that the pod was then."""

    action: Action
    epoch: int
    started_at_s: float
    root: str  # of the adapter, as the pod listed it then


class PodLedger:
    """The pods, and the calls to them.

    Attributes:
        pods_of: Addresses by served name: those that list it, up or not. Names that cannot be of
            an adapter that was ever declared are left out.
        changed: Those of them whose pods or attempts have changed; for the caller to clear.
        is_behind: A new list is to be read at the next look.

    Args:
        select: Returns those of some served names that may be of a declared adapter, or of one that
            was.
        is_reshaped: Pods came, went, or can do something else; likewise.
    """

    def __init__(self, select: Callable[[Iterable[str]], list[str]]) -> None:
        self._select = select
        self.is_behind = False
        self.pods: dict[str, PodHistory] = {}
        self.pods_of: dict[str, set[str]] = {}
        self.attempts = Attempts()
        self.changed: set[str] = set()
        self.is_reshaped = False
        self._calls: dict[str, _Call] = {}
        self._shape: list[tuple[object, ...]] = []

    @property
    def num_loading(self) -> int:
        """Loads on their way."""
        return sum(call.action.kind is CallKind.LOAD for call in self._calls.values())

    def call_at(self, address: str) -> Action | None:
        """Return the call that is on its way to a pod."""
        call = self._calls.get(address)
        return None if call is None else call.action

    def is_called(self, address: str, *, since_s: float) -> bool:
        """Return whether a call to a pod is on its way that started then or later."""
        call = self._calls.get(address)
        return call is not None and call.started_at_s >= since_s

    def coming_to(self, served: str) -> set[str]:
        """Return the addresses of the pods that are to have it, and do not list it yet."""
        coming = {a for a, pod in self.pods.items() if served in pod.verifying}
        for address, call in self._calls.items():
            if call.action.name == served and call.action.kind is not CallKind.UNLOAD:
                coming.add(address)
        return coming

    def coming(self) -> set[str]:
        """Return the served names of all of these."""
        calls = [call.action for call in self._calls.values()]
        names = {action.name for action in calls if action.kind is not CallKind.UNLOAD}
        return names.union(*[pod.verifying for pod in self.pods.values()])

    def due_s(self) -> float:
        """Return when something is due that no call tells; inf for never."""
        times = [until_s for pod in self.pods.values() for until_s in pod.verifying.values()]
        times += [pod.mute_until_s for pod in self.pods.values() if pod.mute_until_s > -inf]
        times += [pod.refusal[2] for pod in self.pods.values() if pod.refusal is not None]
        return min([self.attempts.due_s(), *times])

    def see(self, states: Iterable[PodState], *, settings: AdapterSettings, now: float) -> None:
        """Take what is known of all pods now."""
        before, self.pods = self.pods, {}
        late: list[tuple[PodHistory, PodState]] = []
        for state in states:
            pod = before.get(state.address) or PodHistory(state.address)
            self.pods[state.address] = pod
            if pod.has_long_news(state, LONG_LIST):
                late.append((pod, state))
            else:
                self._see(pod, state, settings=settings, now=now)
        # The one that waits longest comes first.
        late.sort(key=lambda each: each[0].state.listed_at_s)
        self.is_behind = len(late) > 1
        for number, (pod, state) in enumerate(late):
            if number:
                old = pod.state
                state = replace(state, models=old.models, listed_at_s=old.listed_at_s)
            self._see(pod, state, settings=settings, now=now)
        for address in before.keys() - self.pods.keys():
            self._unlist(address, before[address].listed)
        if before.keys() != self.pods.keys():
            self.attempts.keep(self.pods)
        shape = [_shape(pod) for pod in self.pods.values()]
        if shape != self._shape:
            self._shape, self.is_reshaped = shape, True

    def _see(
        self, pod: PodHistory, state: PodState, *, settings: AdapterSettings, now: float
    ) -> None:
        address, names = state.address, pod.listed
        seen = pod.see(state, now=now)
        if pod.listed is not names:
            self._unlist(address, names.keys() - pod.listed.keys())
            for name in self._select(pod.listed.keys() - names.keys()):
                self.pods_of.setdefault(name, set()).add(address)
        self.changed.update(self._select(seen.changed))
        if seen.is_restarted:
            self.changed.update(self.attempts.forget_pod(address))
        elif seen.is_back:
            self.changed.update(self.attempts.forget_passing(address))
        for name in seen.left:
            attempt = self.attempts.of(address, name)
            if attempt is not None and attempt.kind is CallKind.UNLOAD:
                self.attempts.forget(address, name)
        for name in seen.lied:
            result = Result(Failure.UNVERIFIED, "it was unloaded but is still listed")
            self._fail(pod, name, CallKind.UNLOAD, result, settings=settings, now=now)
        if pod.refusal is not None and now >= pod.refusal[2]:
            pod.refusal = None
        if now >= pod.mute_until_s:
            pod.mute_until_s = -inf
        self._verify(pod, settings=settings, now=now)

    def _verify(self, pod: PodHistory, *, settings: AdapterSettings, now: float) -> None:
        """See whether the pod lists what it said it had loaded."""
        for name, until_s in list(pod.verifying.items()):
            if name in pod.listed:
                if not settings.needs_effect:  # else that is not all
                    self.attempts.succeed(pod.state.address, name)
            elif now >= until_s:
                result = Result(Failure.UNVERIFIED, "the pod loaded it but does not list it")
                self._fail(pod, name, CallKind.LOAD, result, settings=settings, now=now)
            else:
                continue
            del pod.verifying[name]
            self.changed.add(name)

    def follow(self, name: str) -> None:
        """Take a name that is declared, and was not."""
        pods = {address for address, pod in self.pods.items() if name in pod.listed}
        if pods:
            self.pods_of[name] = pods
            self.changed.add(name)

    def _unlist(self, address: str, names: Iterable[str]) -> None:
        for name in [name for name in names if name in self.pods_of]:
            self.changed.add(name)
            pods = self.pods_of[name]
            pods.discard(address)
            if not pods:
                del self.pods_of[name]

    def _fail(
        self,
        pod: PodHistory,
        name: str,
        kind: CallKind,
        result: Result,
        *,
        settings: AdapterSettings,
        now: float,
    ) -> None:
        self.changed.add(name)
        failure, message = result.failure or Failure.ENGINE, result.message
        if failure in OF_THE_POD:
            pod.refusal = failure, message, now + settings.rest_s
            return
        address, num_elsewhere = pod.state.address, 0
        listing = self.pods_of.get(name, ())
        if failure is Failure.NO_EFFECT and not any(self.pods[a].effect(name) for a in listing):
            num_elsewhere = self.attempts.num_without_effect(name, except_at=address)
        self.attempts.fail(
            *(address, name, kind, failure, message),
            settings=settings,
            now=now,
            num_elsewhere=num_elsewhere,
        )

    # --- calls ------------------------------------------------------------------------------

    def begin(self, action: Action, *, now: float) -> None:
        """Count a call that starts now."""
        pod = self.pods[action.address]
        root = pod.listed.get(action.name, "")
        self._calls[action.address] = _Call(action, pod.epoch, now, root)
        if action.kind is CallKind.UNLOAD:
            pod.leaving = action.name
        elif pod.state.num_pending:  # else it stalls nobody
            (pod.starts if action.kind is CallKind.LOAD else pod.checks).start(now)

    def finished(
        self, action: Action, result: Result, *, settings: AdapterSettings, now: float
    ) -> None:
        """Take what came of a call. One that is not on its way, or of a process that is gone, or
        to a pod that is, tells nothing."""
        if self.call_at(action.address) != action:
            return
        call = self._calls.pop(action.address)
        self.changed.add(action.name)
        pod = self.pods.get(action.address)
        if pod is None:
            return
        pod.leaving = ""
        if pod.epoch != call.epoch:
            return
        if action.kind is CallKind.CHECK:
            self._check(pod, action.name, call.root, result, settings=settings, now=now)
        elif result.failure is not None:
            self._fail(pod, action.name, action.kind, result, settings=settings, now=now)
        elif action.kind is CallKind.LOAD:
            pod.loaded(action.name, until_s=now + settings.verify_s)
        else:
            self._unlist(action.address, pod.listed.keys() & {action.name})
            pod.unloaded(action.name, now=now)

    def _check(
        self,
        pod: PodHistory,
        name: str,
        root: str,
        result: Result,
        *,
        settings: AdapterSettings,
        now: float,
    ) -> None:
        """Take what came of a check: one that fails is a failure of the load."""
        if result.failure is None:
            pod.checked(name, root, has_effect=result.has_effect)
            self.attempts.succeed(pod.state.address, name)
            return
        if result.failure is Failure.NO_EFFECT:
            pod.checked(name, root, has_effect=False)
        if result.is_of_pod:
            pod.mute_until_s = now + settings.backoff_max_s
        self._fail(pod, name, CallKind.LOAD, result, settings=settings, now=now)


def _shape(pod: PodHistory) -> tuple[object, ...]:
    """Return what decides about where adapters may go."""
    state = pod.state
    sizes = state.max_loras, state.max_cpu_loras, state.max_rank
    kind = pod.bases, state.pools, state.is_resolver
    is_mute = pod.mute_until_s > -inf
    return (state.address, pod.is_usable, kind, sizes, pod.refusal is None, is_mute)
