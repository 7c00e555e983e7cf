"""What was logged."""

from __future__ import annotations

import logging

import pytest


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines that an operator should look at."""
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
