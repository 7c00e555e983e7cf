"""A whole service under attack: `make fuzz-service`.

A real Envoy, a real router under a limit of memory, honest pods; and random hostile clients, pods
and watchers, who attack by asymmetry: their rate and their volume are bounded, so that the machine
can carry them. Ten honest clients ask all the while, and every request of theirs must succeed.
Blocks without attack stand between those with it, on the same processes and in the same hour.

The exit status is 1 where an honest request failed, a process died, the router passed its memory,
counts did not add up, or p99 more than doubled (the median over the blocks, each beside the quiet
one before it).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Final

import uvloop
import yaml

from bench.figures import by_label, parse_counters, total
from bench.fuzzattack import BROKE, Plan, choices
from bench.fuzzhonest import HonestClients, summarise
from bench.fuzzreport import Phase, Result, p99_ratios, render
from bench.fuzzstack import Attack, Target, Watch, attacking, port_of, running
from bench.machine import describe
from bench.processes import get, raise_file_limit
from bench.report import default_path, write_json
from extproc.envoy.bootstrap import BootstrapOptions, Mode, RequestBody
from extproc.stack.processes import StackError

MAX_RSS_BYTES: Final = 256 * 2**20
MAX_P99_RATIO: Final = 2.0

_SETTLE_S: Final = 3.0
"""After an attack, before quiet is measured; honest requests fail no more than ever in it."""
_DRAIN_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Options:
    """The settings of a run.

    Attributes:
        mode: Envoy's way to the pods.
        body: Envoy's mode of sending bodies to the router; None for the default of `mode`.
        seed: Of everything random; the attackers of block N have `seed + N`.
        blocks: Pairs of a quiet block and one with attack.
        attack_s: Length of the latter.
        quiet_s: Length of the former.
        honest_per_s: Requests of the honest clients together.
        patience_s: Envoy's, for one answer of the router; an honest client's is three times that.
        hostile_per_s: Attacks begun a second.
        max_at_once: Attackers at one time.
        hostile_bytes_per_s: What they send together.
        hold_s: How long slow attackers stay.
        pods_each: Hostile pods of each kind.
        kinds: Kinds of attack; empty means all.
        max_rss_bytes: The router's limit.
        config: More of the router's configuration, by section.
    """

    mode: Mode = Mode.ORIGINAL_DST
    body: RequestBody | None = None
    seed: int = 1
    blocks: int = 3
    attack_s: float = 300.0
    quiet_s: float = 120.0
    honest_per_s: float = 50.0
    patience_s: float = 10.0
    hostile_per_s: float = 40.0
    max_at_once: int = 1000
    hostile_bytes_per_s: float = 10e6
    hold_s: float = 20.0
    pods_each: int = 1
    kinds: tuple[str, ...] = ()
    max_rss_bytes: int = MAX_RSS_BYTES
    config: dict[str, Any] = field(default_factory=dict)


class Run:
    """One run of blocks over running processes."""

    def __init__(self, target: Target, options: Options) -> None:
        self._target = target
        self._options = options
        self._watch = Watch(target, options.max_rss_bytes)
        rng = Random(options.seed)
        self._clients = HonestClients(
            target.url, rng, rate_per_s=options.honest_per_s, timeout_s=3 * options.patience_s
        )
        self._measured: list[dict[str, Any]] = []

    async def run(self) -> Result:
        """Quiet, attack, rest, as often as asked for; then wait for all to end."""
        loop = asyncio.get_running_loop()
        asking = loop.create_task(self._clients.run())
        helpers = [loop.create_task(self._watch.run()), loop.create_task(self._watch.probe())]
        try:
            await self._blocks()
        finally:
            self._clients.stop()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asking, _DRAIN_S)
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
        return await self._result()

    async def _blocks(self) -> None:
        options = self._options
        for number in range(1, options.blocks + 1):
            await self._phase(f"quiet {number}", options.quiet_s)
            plan = self._plan(options.seed + number)
            async with attacking(plan) as attack:
                self._target.list_pods(attack.addresses)
                await self._phase(f"attack {number}", options.attack_s, attack)
            self._target.list_pods()
            await self._phase(f"settling {number}", _SETTLE_S)

    def _plan(self, seed: int) -> Plan:
        options, (router,) = self._options, self._target.routers
        return Plan(
            envoy_port=port_of(self._target.url),
            grpc_port=port_of(router.address),
            admin_port=port_of(router.admin_url),
            seed=seed,
            rate_per_s=options.hostile_per_s,
            max_at_once=options.max_at_once,
            bytes_per_s=options.hostile_bytes_per_s,
            hold_s=options.hold_s,
            num_pods=options.pods_each,
            kinds=options.kinds,
        )

    async def _phase(self, name: str, seconds: float, attack: Attack | None = None) -> None:
        """Let it last so long, or until something is wrong."""
        if self._watch.faults:
            return
        self._clients.phase = name
        self._watch.begin_phase()
        began_s, used_s = time.monotonic(), self._target.cpu_s()
        log_bytes = self._log_bytes()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._watch.has_faults.wait(), seconds)
        elapsed_s = time.monotonic() - began_s
        now_s = used_s if self._watch.faults else self._target.cpu_s()
        cores = {key: (now_s[key] - used_s[key]) / elapsed_s for key in used_s}
        if attack is not None and not self._watch.faults:
            await attack.end()
            cores["attackers"] = attack.cpu_s / elapsed_s
        self._measured.append(
            {
                "name": name,
                "seconds": elapsed_s,
                "cores": cores,
                "rss_mb": {key: held / 1e6 for key, held in self._watch.rss_bytes.items()},
                "slowest_health_ms": self._watch.slowest_health_s * 1e3,
                "log_bytes": self._log_bytes() - log_bytes,
                "attack": attack.tally if attack is not None else None,
            }
        )

    def _log_bytes(self) -> int:
        return self._target.children["router"].log_path.stat().st_size

    async def _result(self) -> Result:
        records = self._clients.records
        phases = [
            Phase(
                honest=summarise(records.asked, each["name"]),
                shaky=summarise(records.shaky, each["name"]),
                **each,
            )
            for each in self._measured
        ]
        samples: dict[str, float] = {}
        faults = list(self._watch.faults)
        if not faults:
            samples, unsettled = await self._settled()
            faults += unsettled
        outcomes = {name for each in phases if each.attack for name in each.attack.outcomes}
        faults += sorted(name for name in outcomes if f": {BROKE}: " in name)
        failed = {each.name: each.honest.failures for each in phases if each.honest.failures}
        faults += [f"honest requests failed in {name}: {why}" for name, why in failed.items()]
        return Result(
            phases=phases,
            p99_ratios=p99_ratios(phases),
            num_series=len(samples),
            abuse=_not_zero(by_label(samples, "extproc_wire_abuse_total", "limit")),
            rejections=_not_zero(by_label(samples, "extproc_rejections_total", "reason")),
            faults=faults,
        )

    async def _settled(self) -> tuple[dict[str, float], list[str]]:
        """The metrics once everything has ended, and what has not."""
        deadline_s = time.monotonic() + _DRAIN_S
        while True:
            page = await asyncio.to_thread(get, f"{self._target.admin_url}/metrics")
            samples = parse_counters(page or "")
            wrong = unbalanced(samples) if page else ["the router's metrics cannot be read"]
            if not wrong or time.monotonic() > deadline_s:
                return samples, wrong
            await asyncio.sleep(0.2)


def unbalanced(samples: dict[str, float]) -> list[str]:
    """Which counts of the router do not add up when nothing is under way."""
    open_picks = int(total(samples, "extproc_picks_in_flight"))
    streams = int(total(samples, "extproc_streams_active"))
    picks = int(total(samples, "extproc_picks_total"))
    ended = int(total(samples, "extproc_completions_total"))
    faults = []
    if open_picks or streams:
        faults.append(f"{open_picks} picks and {streams} streams are still open")
    if picks != ended:
        faults.append(f"{picks} picks, but {ended} ended")
    return faults


def _not_zero(counts: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}


def run(options: Options) -> Result:
    """Start everything, run the blocks, end everything.

    Raises:
        StackError: Something did not start.
    """
    raise_file_limit()
    bootstrap = BootstrapOptions(
        mode=options.mode, request_body=options.body, message_timeout_s=options.patience_s
    )
    with running(bootstrap, options.config, options.max_rss_bytes) as target:
        return uvloop.run(Run(target, options).run())


# ---- the command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it and judge."""
    args = _parse(arguments)
    print(f"seed {args.seed}", flush=True)
    try:
        choices(args.kinds)
        machine = describe()
        options = _options(args)
        result = run(options)
    except (StackError, ValueError, OSError) as error:
        print(f"fuzz-service: {error}", file=sys.stderr)
        return 1
    print(render(result))
    path = args.out or default_path("fuzz-service", machine, is_quick=args.quick)
    write_json({"machine": machine, "options": asdict(options), **asdict(result)}, path)
    print(f"\n{path}", file=sys.stderr)
    return 1 if result.faults or result.slowdown > MAX_P99_RATIO else 0


def _options(args: argparse.Namespace) -> Options:
    options = Options(
        mode=args.mode,
        body=args.body,
        seed=args.seed,
        blocks=args.blocks,
        hostile_per_s=args.rate,
        max_at_once=args.attackers,
        hostile_bytes_per_s=args.mb_per_s * 1e6,
        pods_each=args.pods_each,
        kinds=tuple(args.kinds),
        max_rss_bytes=args.memory_mb * 2**20,
        config=yaml.safe_load(args.config.read_text()) if args.config else {},
    )
    if args.quick:
        options = replace(options, blocks=1, attack_s=30.0, quiet_s=15.0, hold_s=5.0)
    if args.duration_s:
        block_s = args.duration_s / options.blocks
        options = replace(options, attack_s=0.7 * block_s, quiet_s=0.3 * block_s)
    return options


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.fuzz_service",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, plain = parser.add_argument, Options()
    add("--quick", action="store_true", help="45 s: a look only")
    add("--duration-s", type=float, help="of all blocks; 30 %% quiet (default 1260)")
    add("--blocks", type=int, default=plain.blocks, help="pairs of quiet and attack")
    add("--seed", type=int, default=plain.seed)
    add("--mode", type=Mode, default=Mode.ORIGINAL_DST, choices=list(Mode))
    add("--body", type=RequestBody, choices=list(RequestBody), help="how bodies come to the router")
    add("--rate", type=float, default=plain.hostile_per_s, help="attacks begun a second")
    add("--attackers", type=int, default=plain.max_at_once, help="at one time, at most")
    add("--mb-per-s", type=float, default=plain.hostile_bytes_per_s / 1e6, help="of all of them")
    add("--pods-each", type=int, default=plain.pods_each, help="hostile pods of each kind")
    add("--kinds", nargs="*", default=(), metavar="SIDE/KIND", help="these only")
    add("--memory-mb", type=int, default=MAX_RSS_BYTES // 2**20, help="the router's limit, MiB")
    add("--config", type=Path, help="YAML: more of the router's configuration")
    add("--out", help="JSON file (default: bench/results/fuzz-service-DATE-machine.json)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
