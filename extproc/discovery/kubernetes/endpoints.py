"""From Kubernetes' objects to endpoints, and to the priorities of objectives.

1. Every pod with an address is an endpoint. It is *ready* if it may get new requests. A pod that is
   being deleted or fails its readiness probe stays, unready, until it is gone, so that its requests
   are still accounted for.
2. A pod that has ended keeps its address in its status while another may have it already: it is no
   endpoint. If two objects have the same address nevertheless, the ready one counts.
3. A pod that serves while it is deleted is a *last resort*, as for kube-proxy (KEP-1669). So is one
   that is not ready and that its Service publishes all the same (`publishNotReadyAddresses`).
4. A pod is one endpoint per port, however many address families it has: two addresses of one
   server would look like two servers with half the load.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from extproc.address import Address
from extproc.discovery.kubernetes.objects import (
    EndpointSlice,
    InferenceObjective,
    InferencePool,
    Pod,
    PoolRef,
    SliceConditions,
    SliceEndpoint,
)
from extproc.types import Endpoint

_ENDED = ("Succeeded", "Failed")
_FAMILIES = ("IPv4", "IPv6")
GROUP_LABEL = "extproc/group"
"""Of pods that differ from the rest; a Service's endpoints do not show the pods' labels."""
ACTIVE_PORTS_ANNOTATIONS = ("llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports")
"""Of a pod that serves on some of its ports only: their numbers, with commas in between. The second
is the older one (kubernetes-sigs/gateway-api-inference-extension, pull request 2256)."""


class _State(NamedTuple):
    is_ready: bool = False
    is_last_resort: bool = False


def pod_endpoints(
    pods: Iterable[Pod], ports: Sequence[int], *, scheme: str = "http"
) -> tuple[Endpoint, ...]:
    """Return an endpoint per port of each pod, sorted by address; our own calls use `scheme`.

    With several ports an endpoint's name tells them apart: `pod:port`. Its group is the value of
    the pod's label. A pod that names its active ports has only these.
    """

    def found() -> Iterator[Endpoint]:
        for pod in pods:
            if pod.status.pod_ip and pod.status.phase not in _ENDED:
                group, state = (pod.metadata.labels or {}).get(GROUP_LABEL, ""), _state_of_pod(pod)
                for port in _active(pod, ports):
                    name = pod.metadata.name if len(ports) == 1 else f"{pod.metadata.name}:{port}"
                    yield _endpoint(pod.status.pod_ip, port, name, scheme, state, group)

    return _merged(found())


def slice_endpoints(
    slices: Iterable[EndpointSlice], port: int | str | None, *, scheme: str = "http"
) -> tuple[Endpoint, ...]:
    """Return the endpoints of all slices of a Service, sorted by address.

    Args:
        slices: All of them; they may repeat an endpoint while it moves from one to another.
        port: Name of the Service's port, or the port number of its pods; None where it has only
            one port. A slice without such a port has no endpoints for us.
        scheme: Of our own calls.

    Raises:
        ValueError: No port was named, and there are several to choose from; after the Service's
            name.
    """
    known = [
        (each, number)
        for each in slices
        if each.address_type in _FAMILIES and (number := _port_of(each, port))
    ]
    v4_pods = {
        endpoint.target_ref.uid
        for each, _ in known
        if each.address_type == "IPv4"
        for endpoint in each.endpoints or ()
        if endpoint.target_ref is not None
    }

    def found() -> Iterator[Endpoint]:
        for each, number in known:
            for endpoint in each.endpoints or ():
                pod = endpoint.target_ref
                is_second = each.address_type == "IPv6" and pod is not None and pod.uid in v4_pods
                if endpoint.addresses and not is_second:
                    name, state = pod.name if pod is not None else "", _state_in_slice(endpoint)
                    yield _endpoint(endpoint.addresses[0], number, name, scheme, state)

    return _merged(found())


def why_no_endpoints(slices: Collection[EndpointSlice], port: int | str | None) -> str:
    """Return why no slice of a Service has an endpoint for us, after the Service's name."""
    if not slices:
        return "has no EndpointSlices: is it the name of a Service in this namespace?"
    filled = [each for each in slices if each.endpoints]
    if not filled:
        return "has no pods"
    known = [each for each in filled if each.address_type in _FAMILIES]
    if not known:
        return "has host names in place of addresses (addressType FQDN), which are not followed"
    ports = {f"{each.name} ({each.port})" for some in known for each in some.ports or ()}
    wanted = "port" if port is None else f"port {port}"
    return f"has no {wanted}, only: {', '.join(sorted(ports)) or 'none'}"


def why_no_pods(pods: Collection[Pod], selector: str) -> str:
    """Return why no pod by a label selector is an endpoint, after the name of who selects."""
    if not pods:
        return f"finds no pod: none has the labels {selector}"
    return f"finds pods by {selector} ({len(pods)}), and none has an address and an active port"


def selection(pool: InferencePool | None) -> tuple[str, tuple[int, ...]] | None:
    """Return the label selector and the ports of an InferencePool.

    None if there is no pool, or it is being deleted, or selects nothing.
    """
    if pool is None or pool.metadata.deletion_timestamp is not None:
        return None
    labels = pool.spec.selector.match_labels or {}
    ports = tuple(port.number for port in pool.spec.target_ports or ())
    if not labels or not ports:
        return None
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items())), ports


def pools_endpoints(by_pool: Mapping[str, Iterable[Endpoint]]) -> tuple[Endpoint, ...]:
    """Return the endpoints of several pools as one list, sorted by address, each with its pools."""
    pools: dict[str, set[str]] = {}
    for name, endpoints in by_pool.items():
        for each in endpoints:
            pools.setdefault(each.address, set()).add(name)
    merged = _merged(each for endpoints in by_pool.values() for each in endpoints)
    return tuple(replace(each, pools=frozenset(pools[each.address])) for each in merged)


def _active(pod: Pod, ports: Sequence[int]) -> list[int]:
    """Return the ports that a pod serves on; what it names that is none of `ports` is ignored."""
    annotations = pod.metadata.annotations or {}
    named = [annotations[name] for name in ACTIVE_PORTS_ANNOTATIONS if name in annotations]
    if not named:
        return list(ports)
    active = {each.strip() for each in named[0].split(",")}
    return [port for port in ports if str(port) in active]


def _state_of_pod(pod: Pod) -> _State:
    is_serving = any(
        condition.type == "Ready" and condition.status == "True"
        for condition in pod.status.conditions or ()
    )
    is_kept = pod.metadata.deletion_timestamp is None
    return _State(is_serving and is_kept, is_serving and not is_kept)


def _state_in_slice(endpoint: SliceEndpoint) -> _State:
    # `serving` counts, too: a Service may publish addresses that are not ready as if they were.
    conditions = endpoint.conditions or SliceConditions()
    is_serving, is_terminating = conditions.serving is not False, conditions.terminating
    is_published = conditions.ready is not False
    if is_published and is_serving and not is_terminating:
        return _State(is_ready=True)
    return _State(is_last_resort=is_serving if is_terminating else is_published)


def _port_of(each: EndpointSlice, wanted: int | str | None) -> int | None:
    ports = each.ports or ()
    if wanted is None:
        if len(ports) > 1:
            names = ", ".join(f"{port.name} ({port.port})" for port in ports)
            raise ValueError(f"has several ports, name one: {names}")
        return ports[0].port if ports else None
    return next((port.port for port in ports if wanted in (port.name, port.port)), None)


def _endpoint(
    ip: str, port: int, name: str, scheme: str, state: _State, group: str = ""
) -> Endpoint:
    address = str(Address(ip, port))
    return Endpoint(
        address,
        f"{scheme}://{address}",
        name,
        is_ready=state.is_ready,
        is_last_resort=state.is_last_resort,
        group=group,
    )


def _merged(endpoints: Iterable[Endpoint]) -> tuple[Endpoint, ...]:
    by_address: dict[str, Endpoint] = {}
    for endpoint in sorted(endpoints, key=_place):
        by_address.setdefault(endpoint.address, endpoint)
    return tuple(by_address.values())


def _place(endpoint: Endpoint) -> tuple[str, bool, bool, str]:
    return endpoint.address, not endpoint.is_ready, not endpoint.is_last_resort, endpoint.name


# --- From InferenceObjectives to the priorities of the objectives that requests name.
#
# Source: the definition v1alpha2 of both API groups: an unset priority is 0, and the pool that is
# referred to is in the same namespace. One of the pools' own group, in v1, may refer to several.

_INT32 = 2**31


def priorities(objectives: Iterable[InferenceObjective], pools: Collection[str]) -> dict[str, int]:
    """Return the priority of each objective of some pools, by name.

    All are of the pools' namespace. The older definition allows any number; one beyond 32 bits
    counts as the nearest within.
    """
    ours = {PoolRef(each) for each in pools}
    return {
        each.metadata.name: int(max(-_INT32, min(each.spec.priority or 0, _INT32 - 1)))
        for each in objectives
        if not ours.isdisjoint(_pools_of(each)) and each.metadata.deletion_timestamp is None
    }


def without_pool(objectives: Iterable[InferenceObjective]) -> list[str]:
    """Return the names of objectives that refer to no pool, as far as they can be read."""
    return [
        each.metadata.name for each in objectives if not any(ref.name for ref in _pools_of(each))
    ]


def _pools_of(objective: InferenceObjective) -> tuple[PoolRef, ...]:
    return objective.spec.pool_ref, *(objective.spec.pool_refs or ())
