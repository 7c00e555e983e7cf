"""The nouns of keeping adapters loaded: what is to be done, and what came of it.

An adapter's *served name* is the name that pods know it by: NAME or NAME@VERSION. A pod *holds* an
adapter if it lists the served name with our path as its root.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class AdapterSettings(Struct, frozen=True):
    """Limits of loading and unloading.

    Attributes:
        max_loads: At once, on all pods together. On one pod there is one call at once.
        max_loads_per_minute: On a pod while it has requests; one without may load one after the
            other, and these do not count.
        load_s: A load takes no longer.
        unload_s: An unload takes no longer.
        check_s: A check takes no longer; half of it for the base model.
        verify_s: Time after a load within which the pod must list the adapter.
        backoff_min_s: Pause after the first failure; each further one doubles it.
        backoff_max_s: The longest such pause.
        max_failures: In a row, after which the pause is `rest_s`.
        rest_s: Pause after so many failures, and where a pod refuses all loads.
        drain_s: Time that requests of an old version get to end.
        grace_s: Time until an old version is unloaded at the earliest: other routers see a little
            later that it is old.
        patience_s: Time for which a load waits for a slot that no running adapter has.
        place_s: Seconds between two looks at where the demand wants adapters.
        checks_effect: Pods are asked whether an adapter changes what its base model answers.
        needs_effect: No pod gets requests for an adapter before it has shown that.
    """

    max_loads: int = 4
    max_loads_per_minute: int = 30
    load_s: float = 60.0
    unload_s: float = 10.0
    check_s: float = 20.0
    verify_s: float = 5.0
    backoff_min_s: float = 1.0
    backoff_max_s: float = 60.0
    max_failures: int = 5
    rest_s: float = 300.0
    drain_s: float = 300.0
    grace_s: float = 3.0
    patience_s: float = 10.0
    place_s: float = 5.0
    checks_effect: bool = False
    needs_effect: bool = False


class CallKind(StrEnum):
    """The calls to a pod."""

    LOAD = "load"
    UNLOAD = "unload"
    CHECK = "check"  # of an adapter's effect


class Action(Struct, frozen=True):
    """A call to be made now.

    Attributes:
        name: The served name.
        path: For a load, as the pod understands it.
        timeout_s: After which the call is given up.
    """

    kind: CallKind
    address: str
    name: str
    path: str = ""
    timeout_s: float = 60.0


class Failure(StrEnum):
    """Why an adapter is not on a pod: a closed set; a metric label and a status reason."""

    FILES = "files"  # missing, unreadable or incomplete
    REFUSED = "refused"  # the engine cannot serve this adapter
    CONFLICT = "conflict"  # the pod has something else under that name
    NO_RUNTIME = "no_runtime"  # the pod loads no adapters while it runs
    UNAUTHORIZED = "unauthorized"  # the pod wants another key
    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    ENGINE = "engine"  # an answer that no engine gives that works
    UNVERIFIED = "unverified"  # the pod said yes, and does not list it
    UNSAFE_VERSION = "unsafe_version"  # its engine would mix weights: it waits for an idle moment
    NO_EFFECT = "no_effect"  # it answers as its base model does
    UNCHECKED = "unchecked"  # whether it does could not be found out
    UNFIT = "unfit"  # no pod has its base model, or carries its rank
    TOO_FEW = "too_few"  # it asks for more pods than there are that can have it


OF_THE_POD = frozenset({Failure.NO_RUNTIME, Failure.UNAUTHORIZED})
"""The same for every adapter: the pod is steered to by what it lists, and nothing is loaded."""
PASSING = frozenset(
    {
        *(Failure.TIMEOUT, Failure.UNREACHABLE, Failure.UNVERIFIED, Failure.UNSAFE_VERSION),
        Failure.UNCHECKED,
    }
)
"""Possibly the pod's trouble rather than the adapter's."""


class Result(Struct, frozen=True):
    """The result of a call: no failure means that the pod said yes, or had nothing to do.

    Attributes:
        has_effect: The adapter that was checked answers differently from its base model, or that
            could not be tried.
        is_of_pod: A check failed as it would for any adapter: the base model gave no answer.
    """

    failure: Failure | None = None
    message: str = ""
    has_effect: bool = True
    is_of_pod: bool = False


class AdapterState(StrEnum):
    """How a declared adapter is."""

    READY = "ready"  # a pod holds it, in this version or in the one before
    LOADING = "loading"  # it is wanted, and may come at any moment
    COLD = "cold"  # the first request loads it
    FAILED = "failed"  # no pod holds it, and all that were tried failed
    UNKNOWN = "unknown"  # it is not declared


class VersionState(StrEnum):
    """How one version of an adapter is."""

    SERVING = "serving"  # requests get it
    WAITING = "waiting"  # it is to serve, and too few pods hold it
    DRAINING = "draining"  # pods have it until its last request ends
    REMOVED = "removed"  # no pod has it


class VersionStatus(Struct, frozen=True):
    """One version of an adapter.

    Attributes:
        name: The served name.
        desired: Pods that should hold it.
        ready: Pods that do.
        removable: No pod needs its files any more.
    """

    name: str
    state: VersionState
    desired: int
    ready: int
    removable: bool = False


class AdapterStatus(Struct, frozen=True):
    """How a declared adapter is, for people and for other programs.

    Attributes:
        reason: Of a pod that it could not be loaded on, or has no effect on, whichever `state` it
            is in; None without.
        message: More of it, in a sentence.
        versions: The declared one first.
    """

    name: str
    state: AdapterState
    reason: Failure | None
    message: str
    versions: tuple[VersionStatus, ...]

    @property
    def is_refused(self) -> bool:
        """No pod can load it, for a reason that will not pass by itself."""
        return self.state is AdapterState.FAILED and self.reason not in PASSING
