"""The run of a suite: which trials, in which processes, and what is kept of their results.

Here is what the laboratory itself must not know: files, processes, the real clock, and policies
found by name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec

from extproc.commands.labcache import TrialCache
from extproc.core.policies import Policy
from extproc.plugins import load_policy
from extproc.sim.engine.profiles import PROFILES
from extproc.sim.opponents import opponent
from extproc.sim.trials.suites import Suite, SuiteError, read_suite, varied
from extproc.sim.trials.summary import FORMAT, summarize
from extproc.sim.trials.trials import Trial, TrialResult, run_trial
from extproc.sim.trials.tuning import best_settings, settings_of

DEFAULT_OUT = Path("loadtest/out")

OnTrial = Callable[[Trial], None]
Watching = Callable[[int, int], AbstractContextManager[OnTrial]]
"""Gets how many trials there are and how many are known already; gives what to call after each."""


def unwatched(_num_trials: int, _num_known: int) -> AbstractContextManager[OnTrial]:
    """Shows nothing."""
    return nullcontext(lambda _trial: None)


def run(
    name: str,
    *,
    policy: str | None = None,
    jobs: int = 0,
    fresh: bool = False,
    out: Path = DEFAULT_OUT,
    watching: Watching = unwatched,
) -> dict[str, Any]:
    """Run the suite called `name`, with a policy of the user's own if there is one.

    Args:
        name: A suite in `loadtest/scenarios/`, or a path.
        policy: As in the configuration file's `policy.name`.
        jobs: Processes; 0 for one per core. The result does not depend on it.
        fresh: Do not take results of an earlier run of this very code.
        out: Where `<suite>.json` is written, and `<suite>.trials.jsonl` while it runs.
        watching: Shows progress.

    Returns:
        What was written.

    Raises:
        SuiteError: The suite cannot be used.
        PolicyError: The policy cannot be had.
        OSError: A file cannot be read or written.
    """
    suite = read_suite(name)
    if policy is not None:
        sys.path.insert(0, os.getcwd())  # a policy of one's own lies beside one
        load_policy(policy, {})
        suite = msgspec.structs.replace(suite, rules=[policy, *suite.rules])
    kept = out / f"{suite.name}.trials.jsonl"
    if fresh:
        kept.unlink(missing_ok=True)
    results = _run_all(plan(suite), jobs, watching, TrialCache(kept))
    result = {**summarize(suite, results), "provenance": PROFILES[suite.profile].provenance}
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{suite.name}.json").write_bytes(msgspec.json.encode(result))
    return result


def tune(
    name: str, *, rules: Sequence[str], jobs: int = 0, watching: Watching = unwatched
) -> dict[str, tuple[str, float]]:
    """The best settings of each rule on a suite, and their mean capacity, requests per second.

    Raises:
        SuiteError: The suite cannot be used, or it is the one that nothing may be tuned on.
        KeyError: A rule has nothing to tune.
    """
    suite = read_suite(name)
    if suite.name == "evaluation":
        raise SuiteError("the evaluation suite is not for tuning")
    labels = [label for rule in rules for label in settings_of(rule)]
    suite = msgspec.structs.replace(suite, rules=labels, bounds=[], sweeps=[])
    return best_settings(_run_all(plan(suite), jobs, watching))


def read_result(path: Path) -> dict[str, Any]:
    """Read the results that `run` has written.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is something else.
    """
    content = msgspec.json.decode(path.read_bytes())
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path}: not a result of this version's `extproc lab run`")
    return content


def newest(out: Path) -> Path:
    """The last file that a run has written there.

    Raises:
        ValueError: There is none.
    """
    found = sorted(out.glob("*.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ValueError(f"no results in {out}: first `extproc lab run quick`")
    return found[-1]


def plan(suite: Suite) -> list[Trial]:
    """Every trial of a suite, in a fixed order: bounds first, they take longest."""
    trials = [
        Trial(
            suite,
            scenario,
            rule,
            tuple(suite.seeds),
            tuple(suite.rates_of(scenario)),
            keeps_placement=rule in suite.rules[:4],
        )
        for scenario in suite.scenarios
        for rule in [*suite.bounds, *suite.rules]
    ]
    scenarios = {scenario.name: scenario for scenario in suite.scenarios}
    for sweep in suite.sweeps:
        trials += [
            Trial(
                suite,
                varied(scenarios[sweep.scenario], sweep, value),
                rule,
                tuple(suite.seeds[: sweep.num_seeds]),
                (sweep.rate_rps,),
                sweep=sweep.name,
                value=value,
            )
            for value in sweep.values
            for rule in sweep.rules
        ]
    return trials


def make_policy(name: str) -> Callable[[], Policy]:
    """The maker of the policy called `name`, called once for each router."""
    return opponent(name) or (lambda: load_policy(name, {}))


def _run_one(trial: Trial) -> list[TrialResult]:
    return run_trial(trial, make_policy, perf_counter)


def _run_all(
    trials: list[Trial], jobs: int, watching: Watching, cache: TrialCache | None = None
) -> list[TrialResult]:
    """Results in the order of the trials; those that the cache has are not run."""
    done = {n: known for n, trial in enumerate(trials) if cache and (known := cache.get(trial))}
    rest = [n for n in range(len(trials)) if n not in done]
    with watching(len(trials), len(done)) as on_trial:
        for number, results in _as_completed(trials, rest, jobs or os.cpu_count() or 1):
            done[number] = results
            if cache:
                cache.add(trials[number], results)
            on_trial(trials[number])
    return [result for number in range(len(trials)) for result in done[number]]


def _as_completed(
    trials: list[Trial], numbers: list[int], jobs: int
) -> Iterator[tuple[int, list[TrialResult]]]:
    if jobs == 1:
        yield from ((number, _run_one(trials[number])) for number in numbers)
        return
    # Spawned, not forked: a progress bar has threads.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        waiting: dict[Future[list[TrialResult]], int] = {
            pool.submit(_run_one, trials[number]): number for number in numbers
        }
        while waiting:
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                yield waiting.pop(future), future.result()
