"""All pods: who lists what, which calls are on their way, and what failed."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from extproc.adapters.attempts import Attempts
from extproc.adapters.podhistory import Pod
from extproc.adapters.states import OF_THE_POD, Action, AdapterSettings, Failure, Kind, Result
from extproc.fleet.podstate import PodState


class _Call(Struct, frozen=True):
    """A call on its way, to the process that the pod was then."""

    action: Action
    epoch: int
    started_at_s: float


class Fleet:
    """The pods, and the calls to them.

    Attributes:
        pods_of: Addresses by served name: those that list it, up or not.
        changed: Served names whose pods or attempts have changed; for the caller to clear.
        is_reshaped: Pods came, went, or can do something else; likewise.
    """

    def __init__(self) -> None:
        self.pods: dict[str, Pod] = {}
        self.pods_of: dict[str, set[str]] = {}
        self.attempts = Attempts()
        self.changed: set[str] = set()
        self.is_reshaped = False
        self._calls: dict[str, _Call] = {}
        self._shape: list[tuple[object, ...]] = []

    @property
    def num_loading(self) -> int:
        """Loads on their way."""
        return sum(call.action.kind is Kind.LOAD for call in self._calls.values())

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
            if call.action.name == served and call.action.kind is Kind.LOAD:
                coming.add(address)
        return coming

    def coming(self) -> set[str]:
        """Return the served names of all of these."""
        calls = [call.action for call in self._calls.values()]
        names = {action.name for action in calls if action.kind is Kind.LOAD}
        return names.union(*[pod.verifying for pod in self.pods.values()])

    def due_s(self) -> float:
        """Return when something is due that no call tells; inf for never."""
        times = [until_s for pod in self.pods.values() for until_s in pod.verifying.values()]
        times += [pod.refusal[2] for pod in self.pods.values() if pod.refusal is not None]
        return min([self.attempts.due_s(), *times])

    def see(self, states: Iterable[PodState], *, settings: AdapterSettings, now: float) -> None:
        """Take what is known of all pods now."""
        before, self.pods = self.pods, {}
        for state in states:
            pod = before.get(state.address) or Pod(state.address)
            self.pods[state.address] = pod
            self._see(pod, state, settings=settings, now=now)
        for address in before.keys() - self.pods.keys():
            self._unlist(address, before[address].listed)
        if before.keys() != self.pods.keys():
            self.attempts.keep(self.pods)
        shape = [_shape(pod) for pod in self.pods.values()]
        if shape != self._shape:
            self._shape, self.is_reshaped = shape, True

    def _see(self, pod: Pod, state: PodState, *, settings: AdapterSettings, now: float) -> None:
        address, names = state.address, pod.listed
        seen = pod.see(state, now=now)
        if pod.listed is not names:
            self._unlist(address, names.keys() - pod.listed.keys())
            for name in pod.listed.keys() - names.keys():
                self.pods_of.setdefault(name, set()).add(address)
        self.changed |= seen.changed
        if seen.is_restarted:
            self.changed.update(self.attempts.forget_pod(address))
        elif seen.is_back:
            self.changed.update(self.attempts.forget_passing(address))
        for name in seen.left:
            self.attempts.forget(address, name)
        for name in seen.lied:
            result = Result(Failure.UNVERIFIED, "it is unloaded, and still listed")
            self._fail(pod, name, Kind.UNLOAD, result, settings=settings, now=now)
        if pod.refusal is not None and now >= pod.refusal[2]:
            pod.refusal = None
        self._verify(pod, settings=settings, now=now)

    def _verify(self, pod: Pod, *, settings: AdapterSettings, now: float) -> None:
        """See whether the pod lists what it said it had loaded."""
        for name, until_s in list(pod.verifying.items()):
            if name in pod.listed:
                self.attempts.succeed(pod.state.address, name)
            elif now >= until_s:
                result = Result(Failure.UNVERIFIED, "the pod loaded it, and does not list it")
                self._fail(pod, name, Kind.LOAD, result, settings=settings, now=now)
            else:
                continue
            del pod.verifying[name]
            self.changed.add(name)

    def _unlist(self, address: str, names: Iterable[str]) -> None:
        for name in names:
            self.changed.add(name)
            pods = self.pods_of[name]
            pods.discard(address)
            if not pods:
                del self.pods_of[name]

    def _fail(
        self,
        pod: Pod,
        name: str,
        kind: Kind,
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
        self.attempts.fail(
            pod.state.address, name, kind, failure, message, settings=settings, now=now
        )

    # --- calls ------------------------------------------------------------------------------

    def begin(self, action: Action, *, now: float) -> None:
        """Count a call that starts now."""
        pod = self.pods[action.address]
        self._calls[action.address] = _Call(action, pod.epoch, now)
        if action.kind is Kind.UNLOAD:
            pod.leaving = action.name
        elif pod.state.num_pending:  # else it stalls nobody
            pod.starts.start(now)

    def finished(
        self, action: Action, result: Result, *, settings: AdapterSettings, now: float
    ) -> None:
        """Take what came of a call. One that is not on its way, or of a process that is gone, or
        to a pod that is, tells nothing."""
        if self.call_at(action.address) != action:
            return
        epoch = self._calls.pop(action.address).epoch
        self.changed.add(action.name)
        pod = self.pods.get(action.address)
        if pod is None:
            return
        pod.leaving = ""
        if pod.epoch != epoch:
            return
        if result.failure is not None:
            self._fail(pod, action.name, action.kind, result, settings=settings, now=now)
        elif action.kind is Kind.LOAD:
            until_s = now + settings.verify_s
            pod.loaded(action.name, until_s=until_s, has_effect=result.has_effect)
        else:
            self._unlist(action.address, pod.listed.keys() & {action.name})
            pod.unloaded(action.name, now=now)


def _shape(pod: Pod) -> tuple[object, ...]:
    """Return what decides about where adapters may go."""
    state = pod.state
    sizes = state.max_loras, state.max_cpu_loras, state.max_rank
    kind = pod.bases, state.pools, state.is_resolver
    return (state.address, pod.is_usable, kind, sizes, pod.refusal is None)
