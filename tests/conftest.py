"""Fixtures and hooks of all tests."""

import importlib
import math
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import settings

from extproc.observe.logs import RepeatLimit

# By these, people and continuous integration ask for colours and for another width.
for name in ("COLUMNS", "FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS", "TTY_COMPATIBLE"):
    os.environ.pop(name, None)

FEW, MANY = 15, 100
"""Examples of a property: in each run, and where there is time (`make coverage`)."""

T = TypeVar("T")

# No deadline: a slow machine is no failure, and benchmarks measure time.
settings.register_profile("few", deadline=None, max_examples=FEW)
settings.register_profile("many", deadline=None, max_examples=MANY)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "few"))
IS_THOROUGH = settings().max_examples > FEW


def some(cases: Iterable[T], num: int) -> list[T]:
    """Return so many of the cases of a property, spread over all; all where there is time."""
    found = list(cases)
    return found if IS_THOROUGH else found[:: -(-len(found) // num)]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests with a real Envoy or API server as slow, unless they are smoke tests."""
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if marks & {"e2e", "kubernetes"} and "smoke" not in marks:
            item.add_marker(pytest.mark.slow)
    _leave_cases_for_where_there_is_time(items)
    if "PYTEST_XDIST_WORKER" in os.environ:
        _put_the_longest_first(items, float(config.getini("timeout")))


def _leave_cases_for_where_there_is_time(items: list[pytest.Item]) -> None:
    """Mark as long what is beyond `few(NUMBER)` cases of a test; those that stay are spread over
    all, so that each of several parameters has different values."""
    cases: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        few = item.get_closest_marker("few")
        if few is not None:
            cases[item.nodeid.partition("[")[0], few.args[0]].append(item)
    for (_, num), each in cases.items():
        kept = {number * len(each) // num for number in range(num)}
        for number, item in enumerate(each):
            if number not in kept:
                item.add_marker(pytest.mark.long)


def _put_the_longest_first(items: list[pytest.Item], default_s: float) -> None:
    """Sort files by their timeouts: a long file that begins last keeps one worker busy alone."""
    by_file: dict[Path, list[float]] = defaultdict(list)
    for item in items:
        timeout = item.get_closest_marker("timeout")
        by_file[item.path].append(timeout.args[0] if timeout else default_s)
    items.sort(key=lambda item: (max(by_file[item.path]), sum(by_file[item.path])), reverse=True)


@pytest.fixture
def limited_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The log with the limit on repeated lines, over the whole test."""
    limit = RepeatLimit(window_s=math.inf)
    caplog.handler.addFilter(limit)
    yield caplog
    caplog.handler.removeFilter(limit)


@pytest.fixture
def unreadable() -> Iterator[Path]:
    """A file that we may not read. Root may read everything, so it becomes nobody."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = Path(folder) / "file"
        path.write_text("text")
        path.chmod(0)
        is_root = os.geteuid() == 0
        if is_root:
            for module in ("extproc.service.startup", "typer.rich_utils"):
                importlib.import_module(module)  # nobody may not be allowed to
            os.seteuid(65534)
        try:
            yield path
        finally:
            if is_root:
                os.seteuid(0)
