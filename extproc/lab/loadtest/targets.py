"""The targets of a load test: fleets that it starts itself, or an endpoint that is running already.

- `policy:NAME` or `policy:NAME?ARG=VALUE`: fake pods, a router with that policy, and a real Envoy.
- `envoy:round_robin`, `envoy:least_request`: the same pods behind Envoy's own load balancer.
- `picker:FILE` or `picker:FILE=LABEL`: the same pods, an endpoint picker of others, and Envoy.
- `url:http://host:port` or `url:http://host:port=LABEL`: an OpenAI endpoint.

Every process of a fleet is a process of the machine, on free ports of the loopback interface.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from extproc.lab.fleet.fleet import BASE_MODEL
from extproc.lab.fleet.settings import FleetSettings
from extproc.lab.loadtest.fleetfiles import (
    BALANCERS,
    balancer_bootstrap,
    claim_headers,
    discovery_section,
    gateway_bootstrap,
    picker_bootstrap,
    pod_configs,
    policy_section,
    router_config,
)
from extproc.lab.loadtest.listing import TargetError, base_url, fetch_listing
from extproc.lab.loadtest.loads import Block
from extproc.lab.loadtest.programs import (
    GivenPicker,
    GivenPod,
    PickerProgram,
    PodProgram,
    read_program,
)
from extproc.lab.loadtest.replay import ReplaySettings, replay
from extproc.lab.trials.specs import Suite
from extproc.lab.trials.suites import variant_of
from extproc.lab.workload.exchange import RequestForm, RequestRecord
from extproc.lab.workload.requests import Arrival, Workload
from extproc.plugins import PolicyError, load_policy
from extproc.stack.processes import START_TIMEOUT_S, ChildProcess, StackError, free_port
from extproc.stack.stack import FakePod, Stack

KINDS = ("policy", "envoy", "picker", "url")
_NUM_WARM_UP = 8
_WARM_UP_GAP_S = 0.1
_WARM_UP_TOKENS = 8
SETTLE_S = 2.0
"""From the start of a target's turn to its first request: routers and pickers have read the pods'
pages again."""


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """A target as given on the command line.

    Attributes:
        kind: One of `KINDS`.
        name: A policy with its arguments, one of `BALANCERS`, a file, or a base URL.
        label: The target's name in tables; unique among the targets compared. A policy in a
            suite's variant has the variant's.
        picker: The program in the file.
        pods: The model server that stands for the fake pods; None for these.
    """

    kind: str
    name: str
    label: str
    picker: PickerProgram | None = field(default=None, kw_only=True)
    pods: PodProgram | None = field(default=None, kw_only=True)

    @property
    def text(self) -> str:
        """The target's name in results."""
        return f"{self.kind}:{self.name if self.kind == 'envoy' else self.label}"


def parse_target(text: str) -> TargetSpec:
    """Parse a target.

    Raises:
        TargetError: It is not valid; the message says what is allowed.
    """
    kind, _, name = text.partition(":")
    if kind not in KINDS or not name:
        raise TargetError(
            f"target {text!r}: give policy:NAME, envoy:{'|'.join(BALANCERS)}, picker:FILE or "
            "url:http://HOST:PORT"
        )
    if kind == "policy":
        _check_policy(name)
        return TargetSpec(kind, name, name)
    if kind == "envoy":
        if name not in BALANCERS:
            raise TargetError(f"target {text!r}: allowed: envoy:{', envoy:'.join(BALANCERS)}")
        return TargetSpec(kind, name, f"envoy's {name}")
    url, _, label = name.partition("=")
    if kind == "picker":
        path = Path(url)
        return TargetSpec(kind, url, label or path.stem, picker=read_program(path, PickerProgram))
    try:
        url = base_url(url)
    except TargetError as error:
        raise TargetError(f"target {text!r}: {error}") from error
    return TargetSpec(kind, url, label or url.split("://")[1])


def parse_targets(texts: Sequence[str], pods: str = "") -> list[TargetSpec]:
    """Parse several targets.

    Args:
        texts: The targets.
        pods: The file of the model server that stands for the fake pods; "" for these.

    Raises:
        TargetError: One is not valid, or two have the same label.
    """
    specs = _distinct([parse_target(text) for text in texts])
    program = read_program(Path(pods), PodProgram) if pods else None
    return [replace(spec, pods=program) for spec in specs]


def suite_targets(suite: Suite, labels: Sequence[str]) -> list[TargetSpec]:
    """Return a suite's policies and variants as targets.

    Args:
        suite: The suite.
        labels: Policies, of the suite or not, and labels of its variants; none for all of the
            suite.

    Raises:
        TargetError: One is unknown, or is named twice.
    """
    own = [*suite.policies, *(variant.label for variant in suite.variants)]
    specs = []
    for label in labels or own:
        policy = variant_of(suite, label).policy
        _check_policy(policy)
        specs.append(TargetSpec("policy", policy, label))
    return _distinct(specs)


def _distinct(specs: list[TargetSpec]) -> list[TargetSpec]:
    labels = [spec.label for spec in specs]
    twice = {label for label in labels if labels.count(label) > 1}
    if twice:
        raise TargetError(f"two targets are called {', '.join(sorted(twice))}")
    return specs


def _check_policy(name: str) -> None:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # for plug-ins, as the router does
    try:
        section = policy_section(name)
        load_policy(section["name"], section["args"])
    except (PolicyError, TypeError, ValueError) as error:
        raise TargetError(f"target policy:{name}: {error}") from error


@dataclass(frozen=True, slots=True)
class RunningTarget:
    """A target that is running.

    Attributes:
        url: Base URL without a trailing slash.
        base_model: The model of requests without an adapter.
        pods: Base URL of each fake pod by its name; empty if unknown.
        headers: Sent with every request.
        programs: Its processes by name; empty if it was not started here.
    """

    spec: TargetSpec
    url: str
    base_model: str = BASE_MODEL
    pods: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    programs: Mapping[str, ChildProcess] = field(default_factory=dict, repr=False)

    @property
    def label(self) -> str:
        """The target's name in tables."""
        return self.spec.label

    @asynccontextmanager
    async def resumed(self) -> AsyncIterator[None]:
        """Have its processes go on meanwhile, and stand still afterwards: pickers that ask their
        pods all the time would take the CPU from the target whose turn it is.
        """
        if self.programs:
            self.send(signal.SIGCONT)
            await asyncio.sleep(SETTLE_S)
        try:
            yield
        finally:
            self.send(signal.SIGSTOP)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all its processes that run."""
        for program in self.programs.values():
            program.send(number)

    async def died(self) -> str:
        """Wait until one of its processes ends, and return which; for ever if it has none."""
        waits = {
            asyncio.ensure_future(program.wait()): name for name, program in self.programs.items()
        }
        if not waits:
            await asyncio.Event().wait()
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return ", ".join(f"{waits[end]} ended with status {end.result()}" for end in done)

    def replay_settings(self, block: Block) -> ReplaySettings:
        """Return the settings of a block's requests to it."""
        settings = block.settings_of(self.label)
        return ReplaySettings(
            self.url,
            RequestForm(base_model=self.base_model),
            self.headers,
            timeout_s=settings.drain_s,
            patience_s=settings.patience_s,
            tenant_headers=claim_headers(block.workload.tenants, settings.declared),
        )


# --- fleets of our own ------------------------------------------------------------------------


@asynccontextmanager
async def running_targets(
    specs: Sequence[TargetSpec], block: Block, headers: Mapping[str, str]
) -> AsyncIterator[list[RunningTarget]]:
    """Start all targets, and warm them up in the same way. They stand still until their turn.

    Args:
        specs: The targets.
        block: The first that they get; it has the fleet of targets that are started here.
        headers: Sent to targets that are running already.

    Raises:
        TargetError: One does not start, or does not respond.
    """
    async with AsyncExitStack() as stack:
        targets = []
        for spec in specs:
            if spec.kind == "url":
                targets.append(await found_target(spec, headers))
            else:
                started = _started(spec, block)
                targets.append(await stack.enter_async_context(started))
        try:
            async with asyncio.TaskGroup() as group:
                for target in targets:
                    group.create_task(_warm_up(target, block))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        for target in targets:
            target.send(signal.SIGSTOP)
        yield targets


@asynccontextmanager
async def _started(spec: TargetSpec, block: Block) -> AsyncIterator[RunningTarget]:
    stack = Stack()
    try:
        try:
            await _start(stack, spec, block)
        except StackError as error:
            raise TargetError(f"{spec.label}: {error}") from error
        pods = {} if spec.pods else {name: pod.url for name, pod in stack.pods.items()}
        yield RunningTarget(spec, stack.url, pods=pods, programs=stack.children)
    finally:
        for program in stack.children.values():
            program.send(signal.SIGCONT)  # else it would not see that it is to end
        await stack.close()


async def _start(stack: Stack, spec: TargetSpec, block: Block) -> None:
    settings, workload = block.settings_of(spec.label), block.workload
    adapters = workload.adapters
    configs = pod_configs(settings, adapters, BASE_MODEL)
    make = partial(GivenPod, spec.pods) if spec.pods else FakePod
    await stack.start_pods({config.name: config for config in configs}, make)
    bootstrap = await _bootstrap(stack, spec, settings, workload)
    within_s = spec.picker.start_within_s if spec.picker else START_TIMEOUT_S
    try:
        await stack.start_envoy(bootstrap, adapters, within_s=within_s)
    except StackError as error:
        if not stack.url or spec.picker is None:
            raise
        asked = f"GET {stack.url}/v1/models"
        raise StackError(f"the picker does not answer Envoy, as for {asked}") from error


async def _bootstrap(
    stack: Stack, spec: TargetSpec, settings: FleetSettings, workload: Workload
) -> str:
    """Start what chooses the pods, and return the bootstrap of an Envoy in front of it."""
    pods = [pod.address for pod in stack.pods.values()]
    if spec.kind == "envoy":
        return balancer_bootstrap(spec.name, pods)
    if spec.picker is not None:
        names = [f"picker-{number}" for number in range(settings.num_routers)]
        pickers = {name: GivenPicker(name, spec.picker, stack.pods) for name in names}
        await stack.start_all(pickers)
        return picker_bootstrap([each.address for each in pickers.values()])
    discovery = discovery_section(settings, pods)
    config = {**router_config(spec.name, settings, workload.tenants), "discovery": discovery}
    for number, section in enumerate(_addresses(settings)):
        await stack.start_router({**config, **section}, f"router-{number}")
    return gateway_bootstrap([each.address for each in stack.routers], settings)


def _addresses(settings: FleetSettings) -> list[dict[str, Any]]:
    """Return each router's sections with its own address, and all of them where they tell."""
    if settings.peer_delay_s is None:
        return [{}] * settings.num_routers
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(settings.num_routers)]
    peers = {"static": addresses}
    server = {"drain_timeout_s": 1.0}
    return [{"server": {**server, "address": each}, "peers": peers} for each in addresses]


async def _warm_up(target: RunningTarget, block: Block) -> None:
    """Send a few short requests: they open connections, load code and reveal mistakes."""
    asked: list[str | None] = [None, *sorted(block.workload.adapters)[: _NUM_WARM_UP - 1]]
    arrivals = tuple(
        Arrival(_WARM_UP_GAP_S * number, model, _WARM_UP_TOKENS, _WARM_UP_TOKENS)
        for number, model in enumerate(asked)
    )
    workload = Workload("warm-up", arrivals, block.workload.adapters)
    records: list[RequestRecord] = []
    settings = replace(target.replay_settings(block), tenant_headers={})
    await replay(workload, settings, records.append)
    if errors := Counter(record.error for record in records if record.error):
        kinds = ", ".join(f"{count} {kind}" for kind, count in errors.items())
        raise TargetError(f"{target.label}: of {len(records)} requests to warm it up: {kinds}")


# --- running already --------------------------------------------------------------------


async def found_target(spec: TargetSpec, headers: Mapping[str, str]) -> RunningTarget:
    """Return a target that is running already.

    Raises:
        TargetError: It does not respond, or lists nothing.
    """
    listing = await fetch_listing(spec.name, headers)
    return RunningTarget(spec, spec.name, listing.base, headers=headers)
