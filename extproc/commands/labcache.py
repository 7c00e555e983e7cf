"""Results of earlier trials, so that an interrupted run continues.

A result is reused only for the same trial and the same code of the package, which
would produce it again. Results of policies from outside the package are not kept.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from extproc.lab.opponents import opponent
from extproc.lab.trials.summary import is_bound
from extproc.lab.trials.trials import Trial, TrialResult

_LISTS = ("policies", "variants", "bounds", "scenarios", "sweeps")


class TrialCache:
    """A file of results, one trial per line; created with its folder by the first result."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._code = _code_digest()
        text = path.read_bytes() if path.exists() else b""
        self._known = dict(entry for line in text.splitlines() for entry in _read(line))
        # An interrupted run may have left an incomplete line; the next one must not join it.
        self._separator = b"" if text.endswith(b"\n") or not text else b"\n"

    def get(self, trial: Trial) -> list[TrialResult] | None:
        """Return the results of a trial, or None if they are not known."""
        return self._known.get(self._key(trial))

    def add(self, trial: Trial, results: list[TrialResult]) -> None:
        """Append the results of a trial.

        Raises:
            OSError: The file cannot be written.
        """
        if not is_bound(trial.policy) and opponent(trial.policy) is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            entry = msgspec.json.encode((self._key(trial), results))
            file.write(self._separator + entry + b"\n")
        self._separator = b""

    def _key(self, trial: Trial) -> str:
        # The lists of a suite and its baseline do not affect the result of a single trial.
        knobs: dict[str, Any] = {"baseline": "", **{name: [] for name in _LISTS}}
        suite = msgspec.structs.replace(trial.suite, **knobs)
        content = msgspec.json.encode((self._code, suite, msgspec.structs.asdict(trial.scenario)))
        own = (trial.policy, trial.label, trial.seeds, trial.rates_rps, trial.sweep, trial.value)
        kept = msgspec.json.encode((*own, trial.keeps_placement))
        return sha256(content + kept).hexdigest()


def _read(line: bytes) -> list[tuple[str, list[TrialResult]]]:
    try:
        return [msgspec.json.decode(line, type=tuple[str, list[TrialResult]])]
    except msgspec.DecodeError:
        return []  # the line at which a run was interrupted


def _code_digest() -> str:
    digest = sha256()
    package = Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
