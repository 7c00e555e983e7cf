"""The pods, routers and gateways of `bench.adapterchaos`, and what happens to them."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from math import inf
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import aiohttp

from bench import chaosplan
from bench.chaosplan import NAMES, NUM_PODS, NUM_ROUTERS, Change, Fault
from bench.chaospods import BASE, OWN, ChaosPod, Ledger
from bench.chaosstores import MIN_REPLICAS, Keeper, served_name, source_of
from extproc.envoy.bootstrap import BootstrapOptions, Mode, render
from extproc.stack.processes import free_port
from extproc.stack.stack import Envoy, Router

_REQUESTS_PER_S, _TOKENS = 8.0, 40
_REQUEST_S = 60.0
_KNOWS_S = 3.0
"""After the start of a router, which then knows all that is declared: lists may fail at first."""
_ERROR = re.compile(rb'"code": ?"([a-z_]+)"')


class Chaos:
    """The processes, and what happens to them.

    Attributes:
        declared: Confirmed versions by name.
        http: For all that is asked.
    """

    def __init__(
        self,
        keeper: Keeper,
        pods: Sequence[ChaosPod],
        http: aiohttp.ClientSession,
        folder: Path,
        seed: int,
    ) -> None:
        self.keeper, self.pods, self.http, self._folder = keeper, pods, http, folder
        self.routers: list[Router] = []
        self.envoys: list[Envoy] = []
        self.declared: dict[str, int] = {}
        self.statuses: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.num_changes = 0
        self._locks = {name: asyncio.Lock() for name in NAMES}
        self._highest = dict.fromkeys(NAMES, 0)
        self._num_started = 0
        self._knows_s = [inf] * NUM_ROUTERS
        self._deleted_s: dict[str, float] = {}
        self._in_trouble: set[tuple[str, int]] = set()
        self._rng = Random(seed)

    # --- what goes wrong --------------------------------------------------------------------

    async def suffer(self, fault: Fault) -> bool:
        """Let a fault happen, to its end; return whether its victim was not in trouble before."""
        kind, for_s = fault.kind, fault.for_s
        victim = _victim(fault)
        if victim in self._in_trouble:
            return False
        self._in_trouble.add(victim)
        try:
            if kind in ("freeze", "crash", "end"):
                await self._trouble_router(fault.victim, kind, for_s)
            elif kind in self.keeper.kinds:
                await self.keeper.disturb(kind, for_s)
            else:
                await self._trouble_pod(self.pods[fault.victim], fault)
        finally:
            self._in_trouble.discard(victim)
        return True

    async def _trouble_router(self, number: int, kind: str, for_s: float) -> None:
        router = self.routers[number]
        if kind == "freeze":
            router.send(signal.SIGSTOP)
            await asyncio.sleep(for_s)
            router.send(signal.SIGCONT)
            return
        await (router.kill() if kind == "crash" else router.stop())
        await asyncio.sleep(for_s)
        await self.start(number)

    def key_file(self, number: int) -> Path:
        """Return the file with the key that a router has for pods."""
        return self._folder / f"router-{number}"

    async def start(self, number: int) -> None:
        """Start a router; its key says to pods which process it is."""
        self._num_started += 1
        self.key_file(number).write_text(f"process-{self._num_started}")
        self._knows_s[number] = inf
        await self.routers[number].start()
        self._knows_s[number] = time.monotonic() + _KNOWS_S

    async def _trouble_pod(self, pod: ChaosPod, fault: Fault) -> None:
        before = pod.trouble.load_s
        if fault.kind == "lose":
            pod.lose()
            return
        if fault.kind == "kill":
            await pod.kill()
            await asyncio.sleep(fault.for_s)
            await pod.start()
            return
        pod.trouble.lies = fault.kind == "lie"
        if fault.kind == "slow":
            pod.trouble.load_s = fault.load_s
        await asyncio.sleep(fault.for_s)
        pod.trouble.lies, pod.trouble.load_s = False, before
        if fault.kind == "slow":
            await asyncio.sleep(fault.load_s)  # of the last slow one

    # --- what people do ---------------------------------------------------------------------

    async def change(self, change: Change) -> None:
        """Declare, edit or delete an adapter, until that is confirmed."""
        name = change.name
        async with self._locks[name]:
            version = self.declared.get(name)
            in_doubt = name in self.keeper.doubtful
            if version is not None and not change.is_edit and not in_doubt:
                await self.keeper.delete(name, change.router)
                del self.declared[name]
                self._deleted_s[name] = time.monotonic()
            else:
                await self._put(name, version, change.step, change.router)
        self.num_changes += 1

    async def _put(self, name: str, version: int | None, step: int, router: int) -> None:
        if name in self.keeper.doubtful:  # what may still arrive must not look like this
            new = self._highest[name] + 1
        else:
            new = 0 if version is None else max(0, version + step)
        self._highest[name] = max(new, self._highest[name])
        await self.keeper.put(name, new, router)
        self.declared[name] = new
        self._deleted_s.pop(name, None)

    async def declare_all(self) -> None:
        """Declare every adapter, as it is at first."""
        for number, name in enumerate(NAMES):
            await self._put(name, None, 0, number % NUM_ROUTERS)

    async def ask(self) -> None:
        """Send requests until cancelled; each that is answered is answered by its adapter."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                name, envoy = self._rng.choice(NAMES), self._rng.choice(self.envoys)
                tasks.create_task(self._ask(name, envoy))
                await asyncio.sleep(1 / _REQUESTS_PER_S)

    async def _ask(self, name: str, envoy: Envoy) -> None:
        status, model = await self.chat(envoy, name, _TOKENS)
        self.statuses[str(status) if status == 200 else f"{status} {model}"] += 1
        if status == 200 and model.partition("@")[0] != name:
            self.wrong.append(f"{name} was answered by {model}")

    async def chat(self, envoy: Envoy, name: str, num_tokens: int) -> tuple[int, str]:
        """Send a request; return its status, and the model that answered or why none did."""
        body = {
            "model": name,
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": num_tokens,
        }
        try:
            url = f"{envoy.url}/v1/chat/completions"
            async with self.http.post(url, json=body) as response:
                answer = await response.read()
                code = _ERROR.search(answer)
                said = response.headers.get("x-served-model", "")
                return response.status, code[1].decode() if code else said
        except (aiohttp.ClientError, OSError):
            return 0, ""
        except TimeoutError:
            self.wrong.append(f"{name} was not answered within {_REQUEST_S:g} s")
            return 0, ""

    # --- whether all is well ----------------------------------------------------------------

    async def not_as_declared(self) -> list[str]:
        """Return what routers and pods have otherwise than declared."""
        try:
            found = self._at_pods() + await self.keeper.unready()
            for number in range(NUM_ROUTERS):
                found += [f"router {number}: {each}" for each in await self._at_router(number)]
            return found
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return [f"no answer: {error!r}"]

    def _at_pods(self) -> list[str]:
        found = []
        wanted = {served_name(*each): source_of(*each) for each in self.declared.items()}
        for pod in self.pods:
            found += [
                f"{pod.name} has {name} from {root}"
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
        return all(knows_s > deleted_s for knows_s in self._knows_s)

    async def _at_router(self, number: int) -> list[str]:
        declared = await self.keeper.declared(number)
        wanted = {name: str(version or "") for name, version in self.declared.items()}
        found = [] if declared == wanted else [f"{declared} are declared, not {wanted}"]
        router, envoy = self.routers[number], self.envoys[number]
        async with self.http.get(f"{envoy.url}/v1/models") as response:
            ids = [each["id"] for each in (await response.json())["data"]]
        names = {each for each in ids if not self._is_forgotten(each)}
        if names != {BASE, OWN, *wanted}:
            found.append(f"{sorted(names)} are listed")
        async with self.http.get(f"{router.admin_url}/debug/adapters") as response:
            statuses = (await response.json())["adapters"]
        for status in statuses:
            now = status["versions"][0]
            if status["state"] != "ready" or now["ready"] < now["desired"]:
                found.append(f"{now['name']} is {status['state']}: {now}, {status['message']}")
        answers = await asyncio.gather(*(self.chat(envoy, name, 1) for name in wanted))
        right = [(200, served_name(*each)) for each in self.declared.items()]
        found += [
            f"{bad} instead of {good}"
            for bad, good in zip(answers, right, strict=True)
            if bad != good
        ]
        return found


def _victim(fault: Fault) -> tuple[str, int]:
    if fault.kind in ("freeze", "crash", "end"):
        return "router", fault.victim
    return ("pod", fault.victim) if fault.kind in chaosplan.KINDS else (fault.kind, 0)


@asynccontextmanager
async def running(keeper: Keeper, ledger: Ledger, seed: int) -> AsyncIterator[Chaos]:
    """Pods, routers, and an Envoy for each.

    Raises:
        StackError: Something did not start.
    """
    async with AsyncExitStack() as exits:
        timeout = aiohttp.ClientTimeout(total=_REQUEST_S)
        connector = aiohttp.TCPConnector(limit=0)
        http = aiohttp.ClientSession(timeout=timeout, connector=connector)
        await exits.enter_async_context(http)
        port = free_port()
        pods = []
        for number in range(NUM_PODS):
            host = f"127.0.0.{2 + number}"
            pods.append(ChaosPod(f"pod-{number}", host, port, ledger, has_own=number == 0))
            await pods[-1].start()
            exits.push_async_callback(pods[-1].kill)
        folder = Path(exits.enter_context(TemporaryDirectory()))
        chaos = Chaos(keeper, pods, http, folder, seed)
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(NUM_ROUTERS)]
        config = await keeper.sections([pod.address for pod in pods], addresses)
        for number in range(NUM_ROUTERS):
            log = {"level": "info", "json_lines": False}
            server = {"drain_delay_s": 0.2, "drain_timeout_s": 1.0}
            key = {"api_key_file": str(chaos.key_file(number))}
            section = {**config, "log": log, "server": server, "pods": key}
            router = Router(section, address=addresses[number], name=f"router-{number}")
            exits.push_async_callback(router.close)
            chaos.routers.append(router)
            envoy = Envoy(render(BootstrapOptions(Mode.ORIGINAL_DST, routers=(router.address,))))
            exits.push_async_callback(envoy.close)
            chaos.envoys.append(envoy)
        await asyncio.gather(*map(chaos.start, range(NUM_ROUTERS)))
        await asyncio.gather(*(envoy.start() for envoy in chaos.envoys))
        keeper.know([router.admin_url for router in chaos.routers])
        yield chaos
