"""What all tests share."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

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


@pytest.fixture
def unreadable() -> Iterator[Path]:
    """A file that we may not read. Root may read everything, so it steps down."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = Path(folder) / "file"
        path.write_text("text")
        path.chmod(0)
        is_root = os.geteuid() == 0
        if is_root:
            os.seteuid(65534)
        try:
            yield path
        finally:
            if is_root:
                os.seteuid(0)
