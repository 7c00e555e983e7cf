"""All pods and the other routers, in one cheap process: `python -m bench.crowd`.

Pods answer chat completions at once or after a while, and never end completions: those are requests
that run. Once
busy, each pod has one of these, sent through the gateway, and what the other routers send there.
They send at a rate of their own, tell that over real links, and have so many requests in flight.
The pods' pages say all of it, as vLLM's do: what has begun after an engine's step, what has ended
at once.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import deque
from functools import partial
from itertools import cycle
from urllib.parse import parse_qsl

import aiohttp
import msgspec
import uvloop

from bench.peers import Peer, Traffic
from bench.pods import (
    ANSWER,
    BASE_MODEL,
    METRICS_TYPE,
    SLOTS,
    Connection,
    Pod,
    adapter_names,
    models_page,
)
from bench.processes import get, raise_file_limit
from extproc.peers.dialler import PeerDialler
from extproc.peers.links import METHOD
from extproc.peers.peering import TICK_S
from extproc.stack.processes import ChildProcess, StackError
from extproc.wire import server as wire

KEY = "a key that all routers of a benchmark share"
_TOLD_PER_POD = 4
_STEP_S = 0.01
"""From a pick to the first page that shows it: to the engine, and to the end of its step."""
_BEGIN, _COUNTS = "/bench/begin", "/bench/counts"
_ON_THE_WAY = 16
"""Of the requests that run on, at most so many that no pod has yet."""
_PATIENCE_S = 60.0


class Plan(msgspec.Struct, frozen=True):
    """What there is.

    Attributes:
        num_adapters: Registered on every pod.
        num_peers: Other routers.
        rate_per_s: Requests a second of each router.
        delay_s: Before a pod answers a chat completion.
    """

    num_pods: int = 16
    num_adapters: int = 64
    num_peers: int = 0
    rate_per_s: float = 0.0
    delay_s: float = 0.0


class Players:
    """The pods and the routers of a plan.

    Attributes:
        asked: To begin, with these arguments of `begin`.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._rng = plan, random.Random(1)
        names = adapter_names(plan.num_adapters)
        self._models = models_page(names)
        each = SLOTS // 2  # the others are for this router's requests
        starts = range(0, each * plan.num_pods, each)
        self.pods = [Pod([names[(s + n) % len(names)] for n in range(each)]) for s in starts]
        self._traffic = Traffic()
        self._loop = loop = asyncio.get_running_loop()
        self._peers = [
            Peer(
                f"peer{number}",
                call_later=loop.call_later,
                clock=time.monotonic,
                keys=[KEY.encode()],
                traffic=self._traffic,
            )
            for number in range(plan.num_peers)
        ]
        self._by_address: dict[str, Pod] = {}
        self._kept: list[object] = []
        self._coming = deque[tuple[float, Pod, str]]()  # picked then, and on no page yet
        self.asked: asyncio.Future[dict[str, str]] = loop.create_future()
        self._on_the_way = asyncio.Semaphore(_ON_THE_WAY)
        self._num_pages = self._num_running = self._num_picks = 0

    async def listen(self) -> dict[str, list[str]]:
        """Listen; return the addresses of pods and of routers."""
        for pod in self.pods:
            connection = partial(Connection, pod, self._answer)
            server = await self._loop.create_server(connection, "127.0.0.1", 0)
            pod.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            self._kept.append(server)
        self._by_address = {pod.address: pod for pod in self.pods}
        servers = [await wire.serve(peer.methods()) for peer in self._peers]
        self._kept += servers
        return {"pods": [*self._by_address], "peers": [each.address for each in servers]}

    def _answer(self, pod: Pod, url: str) -> tuple[str, bytes, float] | None:
        path, _, query = url.partition("?")
        kind, page, delay_s = "application/json", b"{}", 0.0
        if path.startswith("/metrics"):
            self._num_pages += 1
            self._show(self._loop.time() - _STEP_S)
            kind, page = METRICS_TYPE, pod.page()
        elif path == "/v1/models":
            page = self._models
        elif path == "/v1/completions":
            self._num_running += 1
            self._on_the_way.release()
            pod.serve(BASE_MODEL)
            return None
        elif path == _BEGIN:
            self.asked.set_result(dict(parse_qsl(query, keep_blank_values=True)))
        elif path == _COUNTS:
            page = msgspec.json.encode(self._counts())
        elif path == "/v1/chat/completions":
            pod.serve()
            page, delay_s = ANSWER, self._plan.delay_s
        return kind, page, delay_s

    def _counts(self) -> dict[str, int]:
        """What there was so far: pages of metrics; requests of this router that run, and picks of
        others; bytes of messages of others, and to them."""
        return {
            "pages": self._num_pages,
            "running": self._num_running,
            "picks": self._num_picks,
            "told_bytes": self._traffic.num_told_bytes,
            "heard_bytes": self._traffic.num_heard_bytes,
        }

    async def begin(self, gateway: str, router: str) -> None:
        """Have pods be busy, then have the routers tell; does not end.

        Raises:
            ExceptionGroup: A request that runs on has ended.
        """
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as http,
            asyncio.TaskGroup() as tasks,
        ):
            # One for each pod there is; they go where the router sends them: without an adapter to
            # every pod.
            body = {"model": BASE_MODEL, "prompt": "Go on.", "max_tokens": 100_000}
            for _ in self.pods:
                await self._on_the_way.acquire()
                tasks.create_task(self._run(http, f"{gateway}/v1/completions", body))
            for peer in self._peers:
                dialler = PeerDialler(METHOD, peer.service.router_id, peer.dialled, rng=self._rng)
                dialler.set_addresses([router])
                self._kept.append(dialler)
            if self._peers:
                tasks.create_task(self._tell())
                tasks.create_task(self._tick())

    async def _run(self, http: aiohttp.ClientSession, url: str, body: object) -> None:
        """Send a request that no pod answers."""
        async with http.post(url, json=body) as response:
            raise StackError(f"a request that runs on has ended: {response.status}")

    async def _tell(self) -> None:
        """Let the routers take turns: each time one sends a request, and one of its own ends."""
        now = self._loop.time
        most, due_s = _TOLD_PER_POD * len(self.pods), now()
        for number, peer in enumerate(cycle(self._peers)):
            pod = self._rng.choice(self.pods)
            adapter = self._rng.choice(pod.adapters)
            peer.start(pod.address, adapter)
            self._coming.append((now(), pod, adapter))
            if number < most:
                continue
            self._show(now() - _STEP_S)
            if len(self._coming) > most:  # all that are in flight: the one that ends has come
                self._show(self._coming[0][0])
            address, adapter = peer.end()
            self._by_address[address].end(adapter)
            self._num_picks += 1
            due_s += 1 / self._plan.rate_per_s / len(self._peers)
            if due_s > now():
                await asyncio.sleep(due_s - now())

    def _show(self, until_s: float) -> None:
        """Have pages show what was picked by then."""
        while self._coming and self._coming[0][0] <= until_s:
            _, pod, adapter = self._coming.popleft()
            pod.serve(adapter)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for peer in self._peers:
                peer.service.tick()


class Crowd(ChildProcess):
    """The process.

    Attributes:
        pods: `ip:port` of each.
        peers: `ip:port` of each other router.
        key_path: File with the routers' key.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__("crowd")
        self.pods: list[str] = []
        self.peers: list[str] = []
        self.key_path = self.dir / "key"
        self.key_path.write_text(KEY)
        self._plan = plan

    async def start(self) -> None:
        """Start, and return once all listen.

        Raises:
            StackError: It does not.
        """
        plan = msgspec.json.encode(self._plan).decode()
        self.spawn([sys.executable, "-m", "bench.crowd", plan])
        said = msgspec.json.decode(await self.wait_until(self._said))
        self.pods, self.peers = said["pods"], said["peers"]

    async def _said(self) -> str:
        first, end, _ = self.log.partition("\n")
        return first if end else ""

    def counts(self) -> dict[str, int]:
        """Return what there was so far: `pages`, `running`, `picks`, `told_bytes`, `heard_bytes`.

        Raises:
            StackError: It does not answer.
        """
        return msgspec.json.decode(self._ask(_COUNTS), type=dict[str, int])

    def begin(self, gateway: str, router: str) -> None:
        """Have pods be busy and routers tell; return once all requests run that are to run on.

        Raises:
            StackError: They do not.
        """
        self._ask(f"{_BEGIN}?gateway={gateway}&router={router}")
        before, until_s = 0, time.monotonic() + _PATIENCE_S
        while (num := self.counts()["running"]) < self._plan.num_pods:
            if num > before:
                before, until_s = num, time.monotonic() + _PATIENCE_S
            if time.monotonic() > until_s:
                raise StackError(f"of {self._plan.num_pods} requests {num} run")
            time.sleep(0.1)

    def _ask(self, path: str) -> str:
        page = get(f"http://{self.pods[0]}{path}")
        if page is None:
            raise StackError(f"the pods do not answer: {self.log[-2000:]}")
        return page


async def _play(plan: Plan) -> None:
    players = Players(plan)
    print(json.dumps(await players.listen()), flush=True)
    await players.begin(**await players.asked)
    await asyncio.Event().wait()


def main() -> None:
    """Play what the plan, the argument in JSON, says, until ended."""
    raise_file_limit()
    uvloop.run(_play(msgspec.json.decode(sys.argv[1], type=Plan)))


if __name__ == "__main__":
    main()
