"""One API server for all tests of a session; each test takes a namespace of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.kubernetes.apiserver import PROGRAMS, ApiServer, find_crds, missing_programs
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.declared import DEFINITION, install
from tests.kubernetes.faultyproxy import FaultyProxy

_numbers = count()


TIMEOUT_S = 300
"""For a test with the fixtures that it is the first to ask for, on a machine with other work."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that use an API server are marked and get a longer timeout."""
    for item in items:
        if "api_server" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.kubernetes)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def api_server() -> Iterator[ApiServer]:
    """A real kube-apiserver with etcd. A test that stops it must start it again."""
    if why := missing_programs(*PROGRAMS):
        pytest.skip(why)
    with ApiServer() as server:
        yield server


@pytest.fixture(scope="session")
def crds_folder() -> Path:
    """The folder of custom resource definitions."""
    folder = find_crds()
    if folder is None:
        pytest.skip("no custom resource definitions: name a folder of them by EXTPROC_CRDS")
    return folder


@pytest.fixture(scope="session")
def crds(api_server: ApiServer, crds_folder: Path) -> Path:
    """The folder of custom resource definitions, after they have been applied."""
    api_server.define(crds_folder)
    return crds_folder


@pytest.fixture(scope="session")
def definition(api_server: ApiServer) -> None:
    """LLMRoutes are served."""
    install(api_server, DEFINITION)


@pytest.fixture
def namespace(api_server: ApiServer) -> str:
    """A new namespace. It is not deleted: that takes a controller."""
    name = f"test-{next(_numbers)}"
    api_server.kubectl("create", "namespace", name)
    return name


@pytest.fixture
async def cluster(api_server: ApiServer, namespace: str) -> AsyncIterator[Cluster]:
    """The namespace, to write to."""
    async with Cluster(api_server, namespace) as cluster:
        yield cluster


@pytest.fixture
async def proxy(api_server: ApiServer) -> AsyncIterator[FaultyProxy]:
    """A proxy before the API server, without faults as yet."""
    async with FaultyProxy(api_server.url, api_server.ca_file, seed=7) as proxy:
        yield proxy


@pytest.fixture
def kubeconfig(request: pytest.FixtureRequest, api_server: ApiServer, namespace: str) -> Path:
    """An administrator's, for the namespace; through the proxy, if the test has it."""
    has_proxy = "proxy" in request.fixturenames
    url = request.getfixturevalue("proxy").url if has_proxy else ""
    return api_server.kubeconfig_for(api_server.admin_token, url=url, namespace=namespace)
