"""The processes of `extproc up`, and what it says about them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import typer

from extproc.commands.demo.demofleet import cpu_places, fake_pods
from extproc.commands.failure import FAILED, failure
from extproc.commands.hints import own_command
from extproc.commands.up.files import UpFiles
from extproc.commands.up.givenpods import ListedPod, ask, cause
from extproc.phrases import listed
from extproc.stack.processes import (
    ChildProcess,
    SignalledError,
    StackError,
    get_page,
    until_signalled,
)
from extproc.stack.stack import Stack, find_envoy

SLOTS = 3
"""Adapter slots of a fake pod, as in the demo."""
_POLL_S = 0.2
_MAX_NAMES = 8
_SERIOUS = re.compile("warning|error|critical", re.IGNORECASE)


def run(
    plan: UpFiles, pods: Sequence[ListedPod], num_fake_pods: int, *, on_started: Callable[[], None]
) -> int:
    """Run everything until a signal, and return the exit status.

    Calls `on_started` once all ports of the plan are in use.

    Raises:
        typer.Exit: There is no Envoy, or a process did not start or has crashed.
    """
    try:
        find_envoy()
        with TemporaryDirectory(prefix="extproc-up-") as folder:
            shared = plan.with_key(Path(folder))
            return asyncio.run(until_signalled(_run(shared, pods, num_fake_pods, on_started)))
    except SignalledError as error:
        return 128 + error.number
    except StackError as error:
        raise failure(error, FAILED) from error


async def _run(
    plan: UpFiles, pods: Sequence[ListedPod], num_fake_pods: int, on_started: Callable[[], None]
) -> int:
    stack = Stack()
    try:
        if num_fake_pods:
            own = {} if plan.adapters is None else {"adapters": ()}
            await stack.start_pods(fake_pods(num_fake_pods, SLOTS, **own))
            pods = [ListedPod(pod.address, pod.name) for pod in stack.pods.values()]
            plan = replace(plan, max_cpu_loras=cpu_places(SLOTS))
        failures = await ask((pod.address for pod in pods), plan.access())
        for address, error in failures.items():
            typer.echo(f"{address} does not list its models: {cause(error)}", err=True)
        await _start_routers(stack, plan, pods)
        await stack.start_envoy(plan.bootstrap(), keeps_ports=True)
        # What answered on their ports may have been other processes.
        _check_running(stack)
        on_started()
        typer.echo(_places(plan, pods))
        return await _stay(stack, plan)
    finally:
        await stack.close()


async def _start_routers(stack: Stack, plan: UpFiles, pods: Sequence[ListedPod]) -> None:
    numbers = range(len(plan.routers))
    names = [f"router-{number + 1}" for number in numbers] if len(numbers) > 1 else ["router"]
    configs = [plan.config(pods, number) for number in numbers]
    await asyncio.gather(*map(stack.start_router, configs, names))


async def _stay(stack: Stack, plan: UpFiles) -> int:
    """Stay until a signal: that is the expected end.

    Raises:
        StackError: A process has ended.
    """
    logs = [_Log(child) for child in stack.children.values()]
    for log in logs:
        log.show(_SERIOUS)
    has_shown = is_waiting = False
    try:
        while True:
            _check_running(stack)
            for log in logs:
                log.show()
            if not has_shown and (cards := await _models(plan)):
                typer.echo(_snippets(plan, cards))
                has_shown = True
            elif not has_shown and not is_waiting:
                typer.echo("no pod answers yet: waiting for one", err=True)
                is_waiting = True
            await asyncio.sleep(_POLL_S)
    except asyncio.CancelledError:
        # Unbuffered: where the terminal is gone, nothing is left to fail at the exit.
        with suppress(OSError):
            os.write(1, b"stopping\n")
        return 0


def _check_running(stack: Stack) -> None:
    for child in stack.children.values():
        child.check_running()


class _Log:
    """The log of a process."""

    def __init__(self, child: ChildProcess) -> None:
        self._child = child
        self._at = 0

    def show(self, only: re.Pattern[str] = re.compile("")) -> None:
        """Show the lines that are new and complete; only those that `only` is found in."""
        with self._child.log_path.open("rb") as log:
            log.seek(self._at)
            text = log.read()
        text = text[: text.rfind(b"\n") + 1]
        self._at += len(text)
        for line in text.decode("utf-8", "replace").splitlines():
            if only.search(line):
                typer.echo(f"{self._child.name}: {line}", err=True)


async def _models(plan: UpFiles) -> list[dict[str, Any]]:
    page = await get_page(f"{_url(plan)}/models")
    cards: list[dict[str, Any]] = json.loads(page)["data"] if page else []
    return cards


def _url(plan: UpFiles) -> str:
    """Return the base URL of the API, as seen from this host."""
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(plan.listen.host, plan.listen.host)
    return f"http://{replace(plan.listen, host=here)}/v1"


def _places(plan: UpFiles, pods: Sequence[ListedPod]) -> str:
    routers = "".join(
        f"\n  live page   http://{admin}/\n  decisions   {own_command()} watch {router}"
        for router, admin in zip(plan.routers, plan.admins, strict=True)
    )
    return f"""
  pods        {listed([pod.name or pod.address for pod in pods], _MAX_NAMES)}
  policy      {plan.policy}
  gateway     {_url(plan)}{routers}"""


def _snippets(plan: UpFiles, cards: Sequence[dict[str, Any]]) -> str:
    """Return the models, and two requests for an adapter, or else for a base model.

    They are completions: models without a chat template refuse chats.
    """
    names = [card["id"] for card in cards]
    model = next((card["id"] for card in cards if card["parent"]), names[0])
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 16}
    arguments = ", ".join(f"{key}={_literal(value)}" for key, value in body.items())
    headers, key = "-H 'content-type: application/json'", '"none"'
    if plan.api_key_file is not None:
        headers += f' -H "authorization: Bearer $(cat {shlex.quote(str(plan.api_key_file))})"'
        key = f"open({_literal(str(plan.api_key_file))}).read().strip()"
    return f"""  models      {listed(names, _MAX_NAMES)}
{_declaring(plan)}
# in a shell
curl {shlex.quote(_url(plan) + "/completions")} {headers} \\
  -d {shlex.quote(_literal(body))}

# in Python
from openai import OpenAI

client = OpenAI(base_url="{_url(plan)}", api_key={key})
reply = client.completions.create({arguments})
print(reply.choices[0].text)

# Ctrl-C stops Envoy and the router
"""


def _declaring(plan: UpFiles) -> str:
    """Return how another adapter is declared, with a name and a folder to fill in."""
    if plan.adapters is None:
        return ""
    token, url = shlex.quote(str(plan.adapters.token_file)), f"http://{plan.admins[0]}/v1/adapters"
    body = {"name": "NAME", "source": str(plan.adapters.path / "NAME")}
    new = plan.adapters.declared
    line = f"  declared    {listed(new, _MAX_NAMES)}\n" if new else ""
    return f"""{line}
# to declare an adapter, and wait until pods have it
curl '{url}?wait=60' -H "authorization: Bearer $(cat {token})" \\
  -d {shlex.quote(_literal(body))}
"""


def _literal(value: object) -> str:
    """Return text that is the value both in JSON and in Python."""
    return json.dumps(value, ensure_ascii=False)
