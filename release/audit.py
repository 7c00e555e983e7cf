"""Known vulnerabilities of what the image installs, by pip-audit."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from release.place import Place, ReleaseError

WITHIN_S = 300.0


def audit(place: Place) -> str:
    """Ask the database of vulnerabilities about constraints.txt; return what it said, in words.

    Raises:
        ReleaseError: Something has a known vulnerability, or the database did not answer.
    """
    pins = str(place.root / "constraints.txt")
    command = [sys.executable, "-m", "pip_audit", "--requirement", pins, "--no-deps"]
    command += ["--disable-pip", "--format", "json", "--progress-spinner", "off", "--timeout", "20"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S)
        dependencies = json.loads(done.stdout)["dependencies"]
    except (subprocess.TimeoutExpired, ValueError, KeyError):
        dependencies = []
    return judge(dependencies, is_required=place.audit == "required")


def judge(dependencies: list[dict[str, Any]], *, is_required: bool) -> str:
    """Return in words what pip-audit says of packages; none at all is no answer.

    Raises:
        ReleaseError: One of them has a known vulnerability, or `is_required` and not all were
            looked up.
    """
    known = [
        f"{each['name']} {each['version']}: {vulnerability['id']}"
        for each in dependencies
        for vulnerability in each.get("vulns", ())
    ]
    if known:
        raise ReleaseError("known vulnerabilities:\n" + "\n".join(known))
    # pip-audit skips, and does not fail, where the database does not answer.
    looked_up = [each for each in dependencies if "skip_reason" not in each]
    if looked_up and len(looked_up) == len(dependencies):
        return f"{len(dependencies)} packages, no known vulnerability"
    if is_required:
        raise ReleaseError("the database of vulnerabilities does not answer for all packages")
    return f"NOT DONE: the database answers for {len(looked_up)} of {len(dependencies)} packages"
