"""Commands in texts that people copy from: as they work in the folder where they are read."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

_NAME = "extproc"


def own_command() -> str:
    """Return how this command was called: `.venv/bin/extproc`, say, where PATH does not have it."""
    called = Path(sys.argv[0])
    if called.parts[-2:] == (_NAME, "__main__.py"):
        return f"{shlex.quote(sys.orig_argv[0])} -m {_NAME}"
    return shown(str(called)) if called.name == _NAME else _NAME


def shown(program: str) -> str:
    """Return a program's name if PATH leads to it, or else its path, quoted for a shell."""
    name = Path(program).name
    found = shutil.which(name)
    is_on_path = found is not None and Path(found).resolve() == Path(program).resolve()
    return name if is_on_path else shlex.quote(program)
