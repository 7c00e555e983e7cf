"""What all tests share."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from extproc.shell.logs import RepeatLimit

# A shared or slow machine is no failure: what a property costs is for the benchmarks to say.
settings.register_profile("extproc", deadline=None)
settings.load_profile("extproc")


@pytest.fixture
def limited_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The log as it is written: of lines that repeat, so many at most."""
    limit = RepeatLimit()
    caplog.handler.addFilter(limit)
    yield caplog
    caplog.handler.removeFilter(limit)
