"""The pods, routers and gateways of `tests.e2e.chaos.run`, and what happens to them."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from math import inf
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from extproc.envoy.bootstrap import BootstrapOptions, Mode, render
from extproc.stack.processes import START_TIMEOUT_S, ChildProcess, free_port
from extproc.stack.stack import Envoy, Router
from tests.e2e.chaos.pods import BASE, OWN, ChaosPod, Ledger
from tests.e2e.chaos.stores import MIN_REPLICAS, Keeper, served_name, source_of
from tests.e2e.fuzz.honest import OK, TIMEOUT, answer

NUM_PODS, NUM_ROUTERS, NUM_ADAPTERS = 4, 2, 12
NAMES = tuple(f"a{number}" for number in range(NUM_ADAPTERS))
_TOKENS = 40
_REQUEST_S = 60.0
_KNOWS_S = 3.0
"""After the start of a router, which then knows all that is declared: lists may fail at first."""
_numbers = count()


class ChaosRouter(Router):
    """A router that has a lease of so many seconds; its key says to pods which process it is.

    Attributes:
        knows_s: When it knows all that is declared.
    """

    kinds = ("freeze", "crash", "end")
    """Stopped for longer than the lease, killed, told to end."""

    def __init__(self, config: Mapping[str, Any], address: str, key: Path, lease_s: float) -> None:
        ours = {
            "log": {"level": "info", "json_lines": False},
            "server": {"drain_delay_s": 0.2, "drain_timeout_s": 1.0},
            "pods": {"api_key_file": str(key)},
        }
        super().__init__({**config, **ours}, address=address, name=key.name)
        self.knows_s = inf
        self._key, self._lease_s = key, lease_s

    async def start(self, *, within_s: float = START_TIMEOUT_S) -> None:
        """See `Router`."""
        self._key.write_text(f"process-{next(_numbers)}")
        self.knows_s = inf
        await super().start(within_s=within_s)
        self.knows_s = time.monotonic() + _KNOWS_S

    async def suffer(self, kind: str, for_s: float) -> None:
        """Let something go wrong, to its end."""
        if kind == "freeze":
            self.send(signal.SIGSTOP)
            await asyncio.sleep(self._lease_s + for_s)
            self.send(signal.SIGCONT)
            return
        await (self.kill() if kind == "crash" else self.stop())
        await asyncio.sleep(for_s)
        await self.start()


Victim = ChaosPod | ChaosRouter | Keeper


class Chaos:
    """The processes, and what happens to them.

    Attributes:
        declared: Confirmed versions by name.
        faults: By kind.
        answers: By `OK` or what was wrong.
        wrong: What must not be.
        num_changes: Confirmed.
    """

    def __init__(
        self,
        keeper: Keeper,
        pods: Sequence[ChaosPod],
        routers: Sequence[ChaosRouter],
        envoys: Sequence[Envoy],
        http: aiohttp.ClientSession,
        seed: int,
    ) -> None:
        self.keeper, self.pods, self.routers = keeper, pods, routers
        self.declared: dict[str, int] = {}
        self.faults: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.num_changes = 0
        self._envoys, self._http = envoys, http
        self._locks = {name: asyncio.Lock() for name in NAMES}
        self._highest = dict.fromkeys(NAMES, 0)
        self._deleted_s: dict[str, float] = {}
        self._in_trouble: set[Victim] = set()
        self._rng = Random(seed)

    # --- what goes wrong --------------------------------------------------------------------

    async def suffer(self, kind: str, for_s: float) -> None:
        """Let something go wrong, to its end, unless its victim is in trouble already."""
        everyone: list[Victim] = [*self.pods, *self.routers, self.keeper]
        victim = self._rng.choice([one for one in everyone if kind in one.kinds])
        if victim in self._in_trouble:
            return
        self._in_trouble.add(victim)
        self.faults[kind] += 1
        print(f"{kind} for {for_s:.1f} s: {victim.name}", file=sys.stderr)
        try:
            await victim.suffer(kind, for_s)
        finally:
            self._in_trouble.discard(victim)

    # --- what people do ---------------------------------------------------------------------

    async def change(self) -> None:
        """Declare, edit or delete an adapter, until that is confirmed."""
        name, router = self._rng.choice(NAMES), self._rng.randrange(NUM_ROUTERS)
        step, is_edit = self._rng.choice((1, 1, -1)), self._rng.random() < 0.6
        async with self._locks[name]:
            version = self.declared.get(name)
            if version is None or is_edit or name in self.keeper.doubtful:
                await self._put(name, version, step, router)
            else:
                await self.keeper.delete(name, self._from(router))
                del self.declared[name]
                self._deleted_s[name] = time.monotonic()
        self.num_changes += 1

    async def _put(self, name: str, version: int | None, step: int, router: int) -> None:
        if name in self.keeper.doubtful:  # what may still arrive must not look like this
            new = self._highest[name] + 1
        else:
            new = 0 if version is None else max(0, version + step)
        self._highest[name] = max(new, self._highest[name])
        await self.keeper.put(name, new, self._from(router))
        self.declared[name] = new
        self._deleted_s.pop(name, None)

    def _from(self, number: int) -> list[str]:
        """Return where to ask the routers, this one first."""
        return [router.admin_url for router in (*self.routers[number:], *self.routers[:number])]

    async def declare_all(self) -> None:
        """Declare every adapter, as it is at first."""
        for number, name in enumerate(NAMES):
            await self._put(name, None, 0, number % NUM_ROUTERS)

    async def ask(self) -> None:
        """Send a request; if it is answered, then by its adapter."""
        name = self._rng.choice(NAMES)
        said, model = await self._chat(self._rng.choice(self._envoys), name, _TOKENS)
        self.answers[said] += 1
        if said == TIMEOUT or (said == OK and model.partition("@")[0] != name):
            self.wrong.append(f"{name}: {said}, answered by {model!r}")

    async def _chat(self, envoy: Envoy, name: str, num_tokens: int) -> tuple[str, str]:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": num_tokens}
        url = f"{envoy.url}/v1/chat/completions"
        return await answer(self._http, url, {"model": name, **body})

    # --- whether all is well ----------------------------------------------------------------

    async def not_as_declared(self) -> list[str]:
        """Return what routers and pods have otherwise than declared."""
        try:
            found = self._at_pods() + await self.keeper.unready()
            for router, envoy in zip(self.routers, self._envoys, strict=True):
                found += [f"{router.name}: {each}" for each in await self._at(router, envoy)]
            return found
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return [f"no answer: {error!r}"]

    def _at_pods(self) -> list[str]:
        wanted = {served_name(*each): source_of(*each) for each in self.declared.items()}
        found = [
            f"{pod.name} has {name} from {root}"
            for pod in self.pods
            for name, root in pod.models.items()
            if wanted.get(name, f"/{OWN}") != root and not self._is_forgotten(name)
        ]
        for name, version in self.declared.items():
            served = served_name(name, version)
            num = sum(served in pod.models for pod in self.pods)
            if num < MIN_REPLICAS.get(name, 1):
                found.append(f"{served} is on {num} pods")
        return found

    def _is_forgotten(self, served: str) -> bool:
        """Return whether no router can know any more that this was declared once."""
        deleted_s = self._deleted_s.get(served.partition("@")[0])
        if not self.keeper.forgets or deleted_s is None:
            return False
        return all(router.knows_s > deleted_s for router in self.routers)

    async def _at(self, router: ChaosRouter, envoy: Envoy) -> list[str]:
        declared = await self.keeper.declared(router.admin_url)
        wanted = {name: str(version or "") for name, version in self.declared.items()}
        found = [] if declared == wanted else [f"{declared} are declared, not {wanted}"]
        cards = (await self._get(f"{envoy.url}/v1/models"))["data"]
        names = {each["id"] for each in cards if not self._is_forgotten(each["id"])}
        if names != {BASE, OWN, *wanted}:
            found.append(f"{sorted(names)} are listed")
        for status in (await self._get(f"{router.admin_url}/debug/adapters"))["adapters"]:
            now = status["versions"][0]
            if status["state"] != "ready" or now["ready"] < now["desired"]:
                found.append(f"{now['name']} is {status['state']}: {now}, {status['message']}")
        answers = await asyncio.gather(*(self._chat(envoy, name, 1) for name in wanted))
        right = [(OK, served_name(*each)) for each in self.declared.items()]
        pairs = zip(answers, right, strict=True)
        return found + [f"{bad} instead of {good}" for bad, good in pairs if bad != good]

    async def _get(self, url: str) -> dict[str, Any]:
        async with self._http.get(url) as response:
            found: dict[str, Any] = await response.json()
        return found


@asynccontextmanager
async def running(
    keeper: Keeper, ledger: Ledger, seed: int, lease_s: float
) -> AsyncIterator[Chaos]:
    """Pods, routers, and an Envoy for each.

    Raises:
        StackError: Something did not start.
    """
    timeout, connector = aiohttp.ClientTimeout(total=_REQUEST_S), aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(timeout=timeout, connector=connector) as http,
        AsyncExitStack() as exits,
    ):
        folder, port = Path(exits.enter_context(TemporaryDirectory())), free_port()
        hosts = [f"127.0.0.{2 + number}" for number in range(NUM_PODS)]
        pods = [ChaosPod(host, port, ledger, has_own=host is hosts[0]) for host in hosts]
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(NUM_ROUTERS)]
        config = await keeper.sections([pod.address for pod in pods])
        config["peers"] = {"static": addresses}
        routers = [
            ChaosRouter(config, address, folder / f"router-{number}", lease_s)
            for number, address in enumerate(addresses)
        ]
        options = (BootstrapOptions(Mode.ORIGINAL_DST, routers=(each,)) for each in addresses)
        envoys = [Envoy(render(each)) for each in options]
        children: list[ChaosPod | ChildProcess] = [*pods, *routers]
        for child in (*children, *envoys):
            exits.push_async_callback(child.close)
        await asyncio.gather(*(child.start() for child in children))
        await asyncio.gather(*(envoy.start() for envoy in envoys))
        yield Chaos(keeper, pods, routers, envoys, http, seed)
