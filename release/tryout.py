"""The wheel, installed in an empty environment and used there as a newcomer would."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from release.packages import Package, from_metadata
from release.place import Place, ReleaseError, run


def install(place: Place, folder: Path) -> Path:
    """Install the wheel with what `extproc demo` needs; return the environment's `bin`.

    Raises:
        ReleaseError: There is no wheel, or it cannot be installed.
    """
    run(sys.executable, "-m", "venv", str(folder))
    python = folder / "bin" / "python"
    wheel = place.made("*.whl")
    pins = str(place.root / "constraints.txt")
    pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "--constraint", pins, f"{wheel}[demo]", cwd=folder)
    return folder / "bin"


def installed(bin_folder: Path) -> list[Package]:
    """Return the Python packages of an environment."""
    found = bin_folder.parent.glob("lib/*/site-packages/*.dist-info/METADATA")
    return [from_metadata(path.read_text(encoding="utf-8")) for path in sorted(found)]


def demonstrate(bin_folder: Path, version: str) -> None:
    """Run `extproc demo`: Envoy, fake pods, three policies, and an adapter that is registered.

    Raises:
        ReleaseError: It says another version, a request failed, or anything else did.
    """
    # Nothing of the checkout: neither its folder nor what the environment says of Python.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env["PATH"] = f"{bin_folder}{os.pathsep}{env.get('PATH', '')}"
    program = str(bin_folder / "extproc")
    said = run(program, "--version", cwd=bin_folder.parent, env=env)
    if version not in said.split():
        raise ReleaseError(f"`extproc --version` says {said!r} and not {version}")
    run(program, "demo", "--seconds", "2", cwd=bin_folder.parent, env=env)
