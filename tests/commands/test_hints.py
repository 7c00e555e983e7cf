"""Commands that are printed work where they are read."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from extproc.commands.demo.policies import remarks
from extproc.commands.hints import own_command
from extproc.commands.labrun import newest
from tests.commandline import output_of

# As pip begins a command whose Python has a space in its path, where `#!` cannot name it.
SCRIPT = f"""#!/bin/sh
'''exec' {shlex.quote(sys.executable)} "$0" "$@"
' '''
from extproc.commands.hints import own_command
print(own_command())
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A command of that name, as pip installs it."""
    path = tmp_path / "my venv" / "bin" / "extproc"
    path.parent.mkdir(parents=True)
    path.write_text(SCRIPT)
    path.chmod(0o755)
    return path


def answer(command: str, folder: Path, *paths: Path) -> str:
    """The output of a command in a shell with these folders first on PATH."""
    path = os.pathsep.join([*map(str, paths), os.environ["PATH"]])
    env = {**os.environ, "PATH": path}
    return output_of("sh", "-c", command, cwd=folder, env=env).strip()


def test_a_command_beside_the_path_is_named_as_it_was_called(script: Path) -> None:
    called = "'my venv/bin/extproc'"

    assert answer(called, script.parents[2]) == called


def test_a_command_on_the_path_is_named_without_a_folder(script: Path) -> None:
    assert answer("extproc", script.parent, script.parent) == "extproc"


def test_a_command_that_another_one_hides_on_the_path_is_named_with_its_folder(
    script: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other" / "extproc"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)

    assert answer(shlex.quote(str(script)), tmp_path, other.parent) == shlex.quote(str(script))


def test_a_module_is_named_with_its_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/extproc/__main__.py"])
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-m", "extproc"])

    assert "check-config" in output_of(*shlex.split(own_command()), "--help")


def test_hints_name_the_command_as_it_was_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [".venv/bin/extproc"])

    assert "`.venv/bin/extproc demo --slots" in remarks(slots=1)
    with pytest.raises(ValueError, match="run `.venv/bin/extproc lab run quick` first"):
        newest(tmp_path)
