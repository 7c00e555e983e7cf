"""A list as an API server keeps it, to make lists and events of."""

from __future__ import annotations

import json
from typing import Any

from extproc.discovery.kubernetes.objects import Pod
from extproc.discovery.kubernetes.objectstore import ObjectStore


def event(type_: str, thing: dict[str, Any]) -> bytes:
    return json.dumps({"type": type_, "object": thing}).encode()


def pod(name: str, version: int | str, ip: str = "") -> dict[str, Any]:
    metadata = {"name": name, "namespace": "n", "resourceVersion": str(version), "uid": name}
    return {"kind": "Pod", "metadata": metadata, "spec": {}, "status": {"podIP": ip}}


def bookmark(version: int) -> bytes:
    return event("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": str(version)}})


GONE = event("ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"})


def page(version: int, *items: dict[str, Any], next_page: str = "") -> bytes:
    metadata = {"resourceVersion": str(version)} | ({"continue": next_page} if next_page else {})
    return json.dumps({"kind": "PodList", "metadata": metadata, "items": items}).encode()


def state_of(store: ObjectStore[Pod]) -> dict[str, str | None]:
    """Address by name."""
    return {each.metadata.name: each.status.pod_ip for each in store.objects}


class Api:
    """Objects, and every event since the beginning."""

    def __init__(self) -> None:
        self.version = 10
        self.state: dict[str, str] = {}
        self.events: list[tuple[int, bytes]] = []

    def put(self, name: str, ip: str) -> None:
        self.version += 1
        type_ = "MODIFIED" if name in self.state else "ADDED"
        self.state[name] = ip
        self.events.append((self.version, event(type_, pod(name, self.version, ip))))

    def delete(self, name: str) -> None:
        if name in self.state:
            self.version += 1
            ip = self.state.pop(name)
            self.events.append((self.version, event("DELETED", pod(name, self.version, ip))))

    def since(self, version: str) -> list[bytes]:
        return [line for number, line in self.events if number > int(version)]

    def pages(self, size: int) -> list[bytes]:
        items = [pod(name, self.version, ip) for name, ip in self.state.items()]
        parts = [items[at : at + size] for at in range(0, len(items), size)] or [[]]
        last = len(parts) - 1
        return [
            page(self.version, *part, next_page="" if index == last else str(index + 1))
            for index, part in enumerate(parts)
        ]
