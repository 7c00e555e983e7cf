"""One API server for all tests of a session; each test takes a namespace of its own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.kubernetes.apiserver import PROGRAMS, ApiServer, find_crds, missing_programs

_numbers = count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What asks for an API server is marked."""
    for item in items:
        if "api_server" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.kubernetes)


@pytest.fixture(scope="session")
def api_server() -> Iterator[ApiServer]:
    """A real kube-apiserver with etcd. A test that stops it must start it again."""
    if why := missing_programs(*PROGRAMS):
        pytest.skip(why)
    with ApiServer() as server:
        yield server


@pytest.fixture(scope="session")
def crds(api_server: ApiServer) -> Path:
    """The folder of custom resource definitions, after they have been applied."""
    folder = find_crds()
    if folder is None:
        pytest.skip("no custom resource definitions: name a folder of them by EXTPROC_CRDS")
    api_server.kubectl("apply", "--server-side", "-f", str(folder))
    api_server.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
    return folder


@pytest.fixture
def namespace(api_server: ApiServer) -> str:
    """A new namespace. It is not deleted: that takes a controller."""
    name = f"test-{next(_numbers)}"
    api_server.kubectl("create", "namespace", name)
    return name
