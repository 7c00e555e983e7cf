"""Which Python runs this process, and whether its compiler is on.

CPython can have a compiler to machine code, off unless the environment has `PYTHON_JIT=1`
(docs/performance.md says what it brings). From 3.14 the interpreter tells; 3.13 does not, so there
the build's options tell whether it has one.
"""

from __future__ import annotations

import sys
import sysconfig
from typing import Any


def interpreter() -> dict[str, str]:
    """Return `python`, its version, and `compiler`: `on`, `off`, `absent` or `unknown`."""
    return {"python": sys.version.split()[0], "compiler": _compiler(getattr(sys, "_jit", None))}


def _compiler(jit: Any) -> str:
    if jit is None:
        options = str(sysconfig.get_config_var("CONFIG_ARGS"))
        return "unknown" if "--enable-experimental-jit" in options else "absent"
    if not jit.is_available():
        return "absent"
    return "on" if jit.is_enabled() else "off"
