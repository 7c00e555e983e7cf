"""The run of a suite: its trials, the processes that run them, and their results.

The laboratory itself has no files, processes, real clock or policies by name; they are here.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import AbstractContextManager, closing, nullcontext
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from threading import Thread
from time import perf_counter, process_time
from typing import Any

import msgspec

from extproc.commands.hints import own_command
from extproc.commands.labcache import TrialCache
from extproc.core.policies import Policy
from extproc.plugins import load_policy
from extproc.sim.engine.profiles import PROFILES
from extproc.sim.opponents import opponent
from extproc.sim.trials.specs import Suite
from extproc.sim.trials.suites import (
    SuiteError,
    check_policies,
    in_fleet,
    read_suite,
    varied,
)
from extproc.sim.trials.summary import FORMAT, summarize
from extproc.sim.trials.trials import Trial, TrialResult, run_trial
from extproc.sim.trials.tuning import best_settings, settings_of

DEFAULT_OUT = Path("loadtest/out")
GC_THRESHOLDS = 50_000, 20, 50
"""A run keeps all its requests, and leaves few cycles behind: to look for them as often as Python's
defaults do (700, 10, 10) takes a tenth of the time."""

OnTrial = Callable[[Trial], None]
Watching = Callable[[int, int], AbstractContextManager[OnTrial]]
"""Takes the number of trials and of known results; the context is called after each trial."""


def unwatched(_num_trials: int, _num_known: int) -> AbstractContextManager[OnTrial]:
    """Show nothing."""
    return nullcontext(lambda _trial: None)


def run(
    name: str,
    *,
    policy: str | None = None,
    only: Sequence[str] = (),
    jobs: int = 0,
    fresh: bool = False,
    out: Path = DEFAULT_OUT,
    watching: Watching = unwatched,
) -> dict[str, Any]:
    """Run the suite `name`, with an additional policy if one is given.

    Args:
        name: A suite in `loadtest/scenarios/`, or a path.
        policy: As `policy.name` in the configuration file.
        only: Policies to run instead of the suite's, without its bounds and sweeps; `policy` or
            others of one's own may be among them. The results are those of a suite `<suite>-only`,
            and leave the whole suite's as they are.
        jobs: Processes; 0 for one per core. The result does not depend on it.
        fresh: Ignore the kept results of earlier runs of the same code.
        out: Where `<suite>.json` is written, and `<suite>.trials.jsonl` while it runs; a path that
            ends with `.json` is the file itself.
        watching: Shows progress.

    Returns:
        The content of `<suite>.json`.

    Raises:
        SuiteError: The suite cannot be used.
        PolicyError: The policy cannot be loaded.
        OSError: A file cannot be read or written.
    """
    suite = read_suite(name)
    added = [policy] if policy else []
    own = dict.fromkeys([*added, *(each for each in only if ":" in each)])
    if own:
        sys.path.insert(0, os.getcwd())  # where a user's policy is
    for each in own:
        load_policy(each, {})
    if only:
        suite = _with_only(suite, [each for each in only if each not in own])
    suite = msgspec.structs.replace(suite, policies=[*own, *suite.policies])
    written = result_path(out, suite.name)
    kept = written.with_suffix(".trials.jsonl")
    if fresh:
        kept.unlink(missing_ok=True)
    results = run_all(plan(suite), jobs, watching, TrialCache(kept))
    result = {**summarize(suite, results), "provenance": PROFILES[suite.profile].provenance}
    written.parent.mkdir(parents=True, exist_ok=True)
    written.write_bytes(msgspec.json.encode(result))
    return result


def result_path(out: Path, suite: str) -> Path:
    """Return the file of a suite's results: `out` itself if it is a `.json` file, or in it."""
    return out if out.suffix == ".json" else out / f"{suite}.json"


def _with_only(suite: Suite, policies: Sequence[str]) -> Suite:
    check_policies(policies)
    fields = {"variants": [], "bounds": [], "sweeps": [], "policies": list(policies)}
    return msgspec.structs.replace(suite, name=f"{suite.name}-only", **fields)


def tune(
    name: str, *, policies: Sequence[str], jobs: int = 0, watching: Watching = unwatched
) -> dict[str, tuple[str, float]]:
    """Return the best settings of each policy on a suite, and their mean capacity (requests/s).

    Raises:
        SuiteError: The suite cannot be used, or is the evaluation suite.
        KeyError: A policy has nothing to tune.
    """
    suite = read_suite(name)
    if suite.name == "evaluation":
        raise SuiteError("the evaluation suite is not for tuning")
    labels = [label for policy in policies for label in settings_of(policy)]
    suite = msgspec.structs.replace(suite, policies=labels, variants=[], bounds=[], sweeps=[])
    return best_settings(run_all(plan(suite), jobs, watching))


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


def plan(suite: Suite) -> list[Trial]:
    """Return every trial of a suite in a fixed order: bounds first, because they take longest."""
    trials = [
        Trial(
            suite,
            scenario,
            policy,
            tuple(suite.seeds),
            tuple(suite.rates_of(scenario)),
            keeps_placement=policy in suite.policies[:4],
        )
        for scenario in suite.scenarios
        for policy in [*suite.bounds, *suite.policies]
    ]
    trials += [
        Trial(
            suite,
            in_fleet(scenario, variant.fleet),
            variant.policy,
            tuple(suite.seeds),
            tuple(suite.rates_of(scenario)),
            label=variant.label,
        )
        for scenario in suite.scenarios
        for variant in suite.variants
    ]
    scenarios = {scenario.name: scenario for scenario in suite.scenarios}
    for sweep in suite.sweeps:
        trials += [
            Trial(
                suite,
                varied(scenarios[sweep.scenario], sweep, value),
                policy,
                tuple(suite.seeds[: sweep.num_seeds]),
                (sweep.rate_rps,),
                sweep=sweep.name,
                value=value,
            )
            for value in sweep.values
            for policy in sweep.policies
        ]
    return trials


def make_policy(name: str) -> Callable[[], Policy]:
    """Return the factory of the policy `name`, called once for each router."""
    return opponent(name) or (lambda: load_policy(name, {}))


def _run_one(trial: Trial) -> list[TrialResult]:
    thresholds, started_s = gc.get_threshold(), process_time()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        results = run_trial(trial, make_policy, perf_counter)
    finally:
        gc.set_threshold(*thresholds)
    for result in results:
        result.cpu_s = (process_time() - started_s) / len(results)
    return results


def run_all(
    trials: list[Trial], jobs: int, watching: Watching, cache: TrialCache | None = None
) -> list[TrialResult]:
    """Return results in the order of the trials; those in the cache are not run."""
    done = {n: known for n, trial in enumerate(trials) if cache and (known := cache.get(trial))}
    rest = [n for n in range(len(trials)) if n not in done]
    completed = _as_completed(trials, rest, jobs or os.cpu_count() or 1)
    with watching(len(trials), len(done)) as on_trial, closing(completed):
        for number, results in completed:
            done[number] = results
            if cache:
                cache.add(trials[number], results)
            on_trial(trials[number])
    return [result for number in range(len(trials)) for result in done[number]]


def _as_completed(
    trials: list[Trial], numbers: list[int], jobs: int
) -> Generator[tuple[int, list[TrialResult]]]:
    if jobs == 1:
        yield from ((number, _run_one(trials[number])) for number in numbers)
        return
    others = active_children()
    # Spawned, not forked: the progress bar has threads.
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

    A Ctrl-C reaches the whole process group: the parent handles it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_wait_for_the_parent_s_end, daemon=True).start()


def _wait_for_the_parent_s_end() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
