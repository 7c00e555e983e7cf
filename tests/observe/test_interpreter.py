"""What is said of the interpreter."""

from __future__ import annotations

import os
import platform
import sys
import sysconfig
from types import SimpleNamespace

import pytest

from extproc.observe.interpreter import interpreter
from tests.commandline import output_of

PRINT = "from extproc.observe.interpreter import interpreter; print(interpreter()['compiler'])"


@pytest.mark.parametrize(
    ("is_available", "is_enabled", "said"),
    [(False, False, "absent"), (True, False, "off"), (True, True, "on")],
)
def test_an_interpreter_that_tells_is_believed(
    monkeypatch: pytest.MonkeyPatch, is_available: bool, is_enabled: bool, said: str
) -> None:
    told = SimpleNamespace(is_available=lambda: is_available, is_enabled=lambda: is_enabled)
    monkeypatch.setattr(sys, "_jit", told, raising=False)

    assert interpreter() == {"python": platform.python_version(), "compiler": said}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (None, "absent"),
        ("'--enable-optimizations' '--with-lto'", "absent"),
        ("'--enable-experimental-jit=yes-off'", "unknown"),
    ],
)
def test_of_one_that_does_not_tell_the_options_of_its_build_are(
    monkeypatch: pytest.MonkeyPatch, options: str | None, said: str
) -> None:
    monkeypatch.delattr(sys, "_jit", raising=False)
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: options)

    assert interpreter()["compiler"] == said


@pytest.mark.parametrize(("asked", "said"), [("0", {"off"}), ("1", {"on"})])
def test_of_this_interpreter_it_is_what_the_environment_asks_for(
    asked: str, said: set[str]
) -> None:
    """Where it has a compiler, and tells."""
    env = {**os.environ, "PYTHON_JIT": asked}
    printed = output_of(sys.executable, "-c", PRINT, env=env)

    assert printed.strip() in said | {"absent", "unknown"}
