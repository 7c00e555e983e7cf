"""Results of earlier trials, so that an interrupted run continues.

A result is reused only for the same trial and the same code of `core`, `workload` and `sim`, which
would produce it again. Results of policies from outside the package are not kept.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from extproc.sim.opponents import opponent
from extproc.sim.trials.summary import is_bound
from extproc.sim.trials.trials import Trial, TrialResult

_LISTS = ("policies", "variants", "bounds", "scenarios", "sweeps")


class _Entry(msgspec.Struct):
    key: str
    results: list[TrialResult]


class TrialCache:
    """A file of results, one trial per line; created with its folder by the first result."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._code = _code_digest()
        self._known: dict[str, list[TrialResult]] = {}
        text = path.read_bytes() if path.exists() else b""
        for line in text.splitlines():
            self._read(line)
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
            entry = msgspec.json.encode(_Entry(self._key(trial), results))
            file.write(self._separator + entry + b"\n")
        self._separator = b""

    def _read(self, line: bytes) -> None:
        try:
            entry = msgspec.json.decode(line, type=_Entry)
        except msgspec.DecodeError:
            return  # the line at which a run was interrupted
        self._known[entry.key] = entry.results

    def _key(self, trial: Trial) -> str:
        # The lists of a suite do not affect the result of a single trial.
        knobs: dict[str, Any] = {name: [] for name in _LISTS}
        suite = msgspec.structs.replace(trial.suite, **knobs)
        content = msgspec.json.encode((self._code, suite, msgspec.structs.asdict(trial.scenario)))
        own = (trial.policy, trial.label, trial.seeds, trial.rates_rps, trial.sweep, trial.value)
        kept = msgspec.json.encode((*own, trial.keeps_placement))
        return sha256(content + kept).hexdigest()


def _code_digest() -> str:
    digest = sha256()
    package = Path(__file__).parents[1]
    for room in ("core", "workload", "sim"):
        for path in sorted((package / room).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
