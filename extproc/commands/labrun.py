"""The run of a suite: its trials, the processes that run them, and their results.

The laboratory itself has no files, processes, real clock or policies by name; they are here.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import closing
from hashlib import sha256
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from threading import Thread
from time import process_time
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec.structs import replace

from extproc.commands.hints import own_command
from extproc.lab.engine.profiles import PROFILES
from extproc.lab.opponents import opponent
from extproc.lab.trials.runplan import changed, places_of, plan, plan_fixed, with_only
from extproc.lab.trials.suites import read_suite
from extproc.lab.trials.summary import FORMAT, is_bound, summarize
from extproc.lab.trials.trials import Trial, TrialResult, run_trial
from extproc.plugins import load_policy

_LISTS = ("policies", "variants", "bounds", "scenarios", "sweeps")


class TrialCache:
    """A file of results, one trial per line, so that an interrupted run continues; created with its
    folder by the first result.

    A result is reused only for the same trial and the same code of the package, which would produce
    it again. Results of policies from outside the package are not kept.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._code = _code_digest()
        text = path.read_bytes() if path.exists() else b""
        self._known = dict(entry for line in text.splitlines() for entry in _read(line))

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
            # A line of its own, also after an incomplete one that an interrupted run left.
            file.write(b"\n" + msgspec.json.encode((self._key(trial), results)))

    def _key(self, trial: Trial) -> str:
        # The lists of a suite and its baseline do not affect the result of a single trial.
        knobs: dict[str, Any] = {"baseline": "", **{name: [] for name in _LISTS}}
        suite = msgspec.structs.replace(trial.suite, **knobs)
        content = msgspec.json.encode((self._code, suite, msgspec.structs.asdict(trial.scenario)))
        own = (trial.policy, trial.label, trial.seeds, trial.rates_rps, trial.sweep, trial.value)
        return sha256(content + msgspec.json.encode(own)).hexdigest()


def _read(line: bytes) -> list[tuple[str, list[TrialResult]]]:
    try:
        return [msgspec.json.decode(line, type=tuple[str, list[TrialResult]])]
    except msgspec.DecodeError:
        return []  # the first line, and one at which a run was interrupted


def _code_digest() -> str:
    digest = sha256()
    package = Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


DEFAULT_OUT = Path("loadtest/out")
GC_THRESHOLDS = 50_000, 20, 50
"""A run keeps all its requests, and leaves few cycles behind: to look for them as often as Python's
defaults do (700, 10, 10) takes a tenth of the time."""

OnTrial = Callable[[int, int], None]
"""Takes the number of trials that are done and that of all: at first, and after each."""


def run(
    name: str,
    places: Sequence[str] = (),
    *,
    fixed: bool = False,
    policy: str | None = None,
    only: Sequence[str] = (),
    num_seeds: int | None = None,
    num_requests: int | None = None,
    fleet: Mapping[str, Any] = MappingProxyType({}),
    profile: Mapping[str, float] = MappingProxyType({}),
    jobs: int = 0,
    fresh: bool = False,
    out: Path = DEFAULT_OUT,
    on_trial: OnTrial = lambda _num_done, _num: None,
) -> dict[str, Any]:
    """Run the suite `name`, with an additional policy if one is given.

    The results of a part of the suite, or of a changed suite, go under the name `<suite>-only`. The
    whole suite's results stay as they are.

    Args:
        name: A suite in `loadtest/scenarios/`, or a path.
        places: Scenarios and rates, as `zipf@68`, to run instead of a search for capacities.
        fixed: Run at all the suite's rates instead of a search.
        policy: As `policy.name` in the configuration file.
        only: Policies, bounds and variants to run instead of the suite's, without its sweeps;
            `policy` or further policies of one's own may be among them. The first is the baseline.
        num_seeds: How many seeds, counted on from the suite's first; None for the suite's own.
        num_requests: Requests of a run instead of the suite's.
        fleet: Fields of `FleetSettings`, over the suite's and the scenarios'.
        profile: Costs of the engine, over the suite's and the scenarios'.
        jobs: Processes; 0 for one per core. The result does not depend on it.
        fresh: Ignore the kept results of earlier runs of the same code.
        out: Where `<suite>.json` is written, and `<suite>.trials.jsonl` while it runs; a path that
            ends with `.json` is the file itself.
        on_trial: Shows progress.

    Returns:
        The content of `<suite>.json`.

    Raises:
        PlanError: The suite, a place, a policy or a key cannot be used.
        PolicyError: The policy cannot be loaded.
        OSError: A file cannot be read or written.
    """
    suite = read_suite(name)
    is_part = bool(places or fixed or only or num_seeds or num_requests or fleet or profile)
    own = list(dict.fromkeys([*filter(None, [policy]), *(each for each in only if ":" in each)]))
    if own:
        sys.path.insert(0, os.getcwd())  # where a user's policy is
    for each in own:
        load_policy(each, {})
    suite = with_only(suite, only)
    policies = [*own, *(each for each in suite.policies if each not in own)]
    first = suite.seeds[0]
    suite = replace(
        changed(suite, fleet, profile),
        name=f"{suite.name}-only" if is_part else suite.name,
        policies=policies,
        seeds=list(range(first, first + num_seeds)) if num_seeds else suite.seeds,
        num_requests=num_requests or suite.num_requests,
    )
    at = places_of(suite, places) if places or fixed else []
    written = result_path(out, suite.name)
    kept = written.with_suffix(".trials.jsonl")
    if fresh:
        kept.unlink(missing_ok=True)
    trials = plan_fixed(suite, at) if at else plan(suite)
    results = run_all(trials, jobs, on_trial, TrialCache(kept))
    result = {**summarize(suite, results), "provenance": PROFILES[suite.profile].provenance}
    written.parent.mkdir(parents=True, exist_ok=True)
    written.write_bytes(msgspec.json.encode(result))
    return read_result(written)


def result_path(out: Path, suite: str) -> Path:
    """Return the file of a suite's results: `out` itself if it is a `.json` file, or in it."""
    return out if out.suffix == ".json" else out / f"{suite}.json"


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not JSON.
    """
    try:
        return msgspec.json.decode(path.read_bytes())
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}") from error


def read_result(path: Path) -> dict[str, Any]:
    """Read the results that `run` wrote.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not such a file.
    """
    content = read_json(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path}: not a result of this version's `extproc lab run`")
    return content


def newest(out: Path) -> Path:
    """Return the newest result in a folder.

    Raises:
        ValueError: There is none.
    """
    found = sorted(out.glob("*.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ValueError(f"no results in {out}; run `{own_command()} lab run quick` first")
    return found[-1]


def _run_one(trial: Trial) -> list[TrialResult]:
    thresholds, started_s = gc.get_threshold(), process_time()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        results = run_trial(trial)
    finally:
        gc.set_threshold(*thresholds)
    cpu_s = (process_time() - started_s) / len(results)
    return [dataclasses.replace(result, cpu_s=cpu_s) for result in results]


def run_all(
    trials: list[Trial], jobs: int, on_trial: OnTrial, cache: TrialCache
) -> list[TrialResult]:
    """Return results in the order of the trials; those in the cache are not run."""
    done = {n: known for n, trial in enumerate(trials) if (known := cache.get(trial))}
    rest = [n for n in range(len(trials)) if n not in done]
    on_trial(len(done), len(trials))
    with closing(_as_completed(trials, rest, jobs or os.cpu_count() or 1)) as completed:
        for number, results in completed:
            done[number] = results
            cache.add(trials[number], results)
            on_trial(len(done), len(trials))
    return [result for number in range(len(trials)) for result in done[number]]


def _as_completed(
    trials: list[Trial], numbers: list[int], jobs: int
) -> Generator[tuple[int, list[TrialResult]]]:
    if jobs == 1:
        yield from ((number, _run_one(trials[number])) for number in numbers)
        return
    others = active_children()
    # Spawned, not forked: nothing of this process's threads is theirs.
    pool = ProcessPoolExecutor(
        jobs, mp_context=get_context("spawn"), initializer=_end_with_the_parent
    )
    try:
        waiting: dict[Future[list[TrialResult]], int] = {
            pool.submit(_run_one, trials[number]): number for number in numbers
        }
        while waiting:
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                yield waiting.pop(future), future.result()
    except BaseException:
        # The pool itself would run every trial to its end.
        for worker in set(active_children()).difference(others):
            worker.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_the_parent() -> None:
    """Have this worker end when its parent is gone, which may have been killed.

    A Ctrl-C reaches the whole process group: the parent's end is theirs.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_wait_for_the_parent_s_end, daemon=True).start()


def _wait_for_the_parent_s_end() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
