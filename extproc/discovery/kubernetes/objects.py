"""The fields of Kubernetes' objects that are read, and the queries for their lists.

An API server sends `null` for empty lists and structures, hence `| None`. Other fields, most of a
Pod, are skipped while decoding.

Sources: kubernetes.io/docs/reference/kubernetes-api (Pod v1, EndpointSlice discovery.k8s.io/v1)
and gateway-api-inference-extension.sigs.k8s.io/reference/spec (InferencePool v1).

The kinds that declare something have their spec and status as bytes. A definition may be laxer than
we know it, and one wrong object must not hide the rest of its list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, Protocol, TypeVar

from msgspec import Raw, Struct, field

NO_VALUE = Raw(b"null")
POOL_GROUP = "inference.networking.k8s.io"
"""API group of InferencePools."""
_OF_POOLS = (f"/apis/{POOL_GROUP}/v1",)
_BESIDE_POOLS = ("/apis/llm-d.ai/v1alpha2", "/apis/inference.networking.x-k8s.io/v1alpha2")
"""APIs of what refers to them, the newer one first."""
ROUTE_GROUP = "llm.extproc"
"""API group of our own kind. Kubernetes wants a dot in it; `extproc` is no top-level domain, so the
name is nobody's."""


class Metadata(Struct, rename="camel", frozen=True):
    """Of any object."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class KubeObject(Struct, frozen=True):
    """Any object."""

    metadata: Metadata

    def differs(self, before: KubeObject) -> bool:
        """Return whether it says anything that it did not say before, as far as it is read."""
        return True


class PodCondition(Struct, frozen=True):
    """Of a Pod's status."""

    type: str = ""
    status: str = ""


class PodStatus(Struct, rename="camel", frozen=True):
    """The fields of a Pod's status that are read."""

    phase: str = ""
    pod_ip: str | None = field(default=None, name="podIP")
    conditions: tuple[PodCondition, ...] | None = None


class Pod(KubeObject, frozen=True):
    """A Pod."""

    status: PodStatus = PodStatus()


class SliceConditions(Struct, frozen=True):
    """Of an endpoint in a slice; None is unknown and counts as true."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class TargetRef(Struct, frozen=True):
    """The object behind an endpoint of a slice: mostly a Pod."""

    name: str = ""
    uid: str = ""


class SliceEndpoint(Struct, rename="camel", frozen=True):
    """An endpoint of a slice. Of the addresses only the first one is to be used."""

    addresses: tuple[str, ...] | None = None
    conditions: SliceConditions | None = None
    target_ref: TargetRef | None = None


class SlicePort(Struct, frozen=True):
    """A port of a slice."""

    name: str | None = None
    port: int | None = None


class EndpointSlice(KubeObject, rename="camel", frozen=True):
    """Some endpoints of a Service, all of one address family and with the same ports."""

    address_type: str = ""
    endpoints: tuple[SliceEndpoint, ...] | None = None
    ports: tuple[SlicePort, ...] | None = None


class TargetPort(Struct, frozen=True):
    """A port that all pods of an InferencePool serve on."""

    number: int


class PoolSelector(Struct, rename="camel", frozen=True):
    """Labels that a Pod of an InferencePool has."""

    match_labels: dict[str, str] | None = None


class PoolSpec(Struct, rename="camel", frozen=True):
    """Of an InferencePool."""

    selector: PoolSelector = PoolSelector()
    target_ports: tuple[TargetPort, ...] | None = None


class InferencePool(KubeObject, frozen=True):
    """An InferencePool."""

    spec: PoolSpec = PoolSpec()


class PoolRef(Struct, frozen=True):
    """A reference to a pool of the same namespace."""

    name: str = ""
    group: str = POOL_GROUP
    kind: str = "InferencePool"


class ObjectiveSpec(Struct, rename="camel", frozen=True):
    """Of an InferenceObjective: one pool, as in v1alpha2, or several, as in v1."""

    pool_ref: PoolRef = PoolRef()
    pool_refs: tuple[PoolRef, ...] | None = None
    priority: int | float | None = None  # no integer, as JSON has it, where it is very large


class InferenceObjective(KubeObject, frozen=True):
    """An InferenceObjective."""

    spec: ObjectiveSpec = ObjectiveSpec()


class Withheld(Struct, frozen=True):
    """The remains of a spec that is not kept.

    Attributes:
        num_bytes: Its length.
        named: The adapter that it is about.
        not_ours: Why the object is not for this router; "" where it is.
    """

    num_bytes: int = 0
    named: str = ""
    not_ours: str = ""


class DeclaringObject(KubeObject, frozen=True):
    """An object that declares something, and that we write the status of.

    Attributes:
        withheld: Of what is kept: stands for a spec that is not, None where it is. An API server
            sends no such field; if one did, whatever it were, no object would be lost for it.
    """

    spec: Raw = NO_VALUE
    status: Raw = NO_VALUE
    withheld: Any = field(default=None, name=".withheld")

    def differs(self, before: KubeObject) -> bool:
        """Return whether the spec, or that it counts, is another: our own writes are no news."""
        old, new = before.metadata, self.metadata
        return (
            not new.generation  # not counted: it shows nothing
            or (old.uid, old.generation, old.deletion_timestamp)
            != (new.uid, new.generation, new.deletion_timestamp)
        )


class InferenceModelRewrite(DeclaringObject, frozen=True):
    """An InferenceModelRewrite."""


class LLMRoute(DeclaringObject, frozen=True):
    """Our own kind: an adapter, and the terms on which it is served."""


T = TypeVar("T", bound=KubeObject)


class Keeper(Protocol):
    """The kept parts of the objects of a query."""

    def one(self, found: Any) -> Any | None:
        """Return what to keep of an object; None for nothing."""

    def bound(self, objects: dict[tuple[str, str], Any]) -> None:
        """Keep less of some objects where all of them are too much."""


class Query(Struct, Generic[T], frozen=True):
    """A list that can be watched: all that is to be known of a kind.

    Attributes:
        kind: The parts of an object that are read.
        resource: Plural, as in RBAC rules.
        apis: Paths of the API groups and versions that may define the kind; the first one that is
            served counts.
        namespace: Empty for the client's own.
        selector: The query parameter that narrows the list.
        is_optional: A cluster need not have a definition of it.
        keeper: The parts of it that are kept; None for all that is read.
    """

    kind: type[T]
    resource: str
    apis: tuple[str, ...]
    namespace: str = ""
    selector: Mapping[str, str] = {}
    is_optional: bool = False
    keeper: Keeper | None = None

    @property
    def title(self) -> str:
        """Its plural, for people."""
        return f"{self.kind.__name__}s"

    def kept(self, found: T) -> T | None:
        """Return what to keep of an object; None for nothing."""
        return found if self.keeper is None else self.keeper.one(found)

    def bound(self, objects: dict[tuple[str, str], T]) -> None:
        """Keep less of some objects where all of them are too much."""
        if self.keeper is not None:
            self.keeper.bound(objects)

    def path(self, api: str, own_namespace: str) -> str:
        """Return the URL's path."""
        return f"{api}/namespaces/{self.namespace or own_namespace}/{self.resource}"


def pods_query(label_selector: str, *, namespace: str = "") -> Query[Pod]:
    """Query pods by labels, in the syntax of kubectl's `-l`."""
    return Query(Pod, "pods", ("/api/v1",), namespace, {"labelSelector": label_selector})


def slices_query(service: str, *, namespace: str = "") -> Query[EndpointSlice]:
    """Query the EndpointSlices of a Service."""
    return Query(
        EndpointSlice,
        "endpointslices",
        ("/apis/discovery.k8s.io/v1",),
        namespace,
        {"labelSelector": f"kubernetes.io/service-name={service}"},
    )


def pool_query(name: str, *, namespace: str = "") -> Query[InferencePool]:
    """Query one InferencePool, by name, so that an RBAC rule can be limited to it."""
    selector = {"fieldSelector": f"metadata.name={name}"}
    return Query(InferencePool, "inferencepools", _OF_POOLS, namespace, selector)


def objectives_query(namespace: str = "") -> Query[InferenceObjective]:
    """Query InferenceObjectives: in the newer API group, the older one, and the pools' own."""
    return Query(
        InferenceObjective,
        "inferenceobjectives",
        _BESIDE_POOLS + _OF_POOLS,
        namespace,
        is_optional=True,
    )


def rewrites_query(
    namespace: str = "", keeper: Keeper | None = None
) -> Query[InferenceModelRewrite]:
    """Query InferenceModelRewrites, in the newer API group and the older one."""
    return Query(
        InferenceModelRewrite,
        "inferencemodelrewrites",
        _BESIDE_POOLS,
        namespace,
        is_optional=True,
        keeper=keeper,
    )


def routes_query(namespace: str = "", keeper: Keeper | None = None) -> Query[LLMRoute]:
    """Query LLMRoutes."""
    return Query(
        LLMRoute,
        "llmroutes",
        (f"/apis/{ROUTE_GROUP}/v1alpha1",),
        namespace,
        is_optional=True,
        keeper=keeper,
    )
