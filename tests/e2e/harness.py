"""Envoy and router processes, and HTTP clients, for the end-to-end tests."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import h2.connection
import h2.events
import yaml
from multidict import CIMultiDict
from yarl import URL

from extproc.stack.processes import ChildProcess as ChildProcess
from extproc.stack.processes import StackError
from extproc.stack.processes import free_port as free_port
from extproc.stack.stack import Envoy, ServeProcess


def peak_memory_bytes(process: ChildProcess) -> int:
    """The largest resident set that a process has had so far."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def connection_manager(bootstrap: dict[str, Any]) -> Any:
    """The HTTP connection manager of a bootstrap's first listener, to be changed."""
    listener = bootstrap["static_resources"]["listeners"][0]
    return listener["filter_chains"][0]["filters"][0]["typed_config"]


def set_header_first(
    bootstrap: dict[str, Any],
    name: str,
    value: str,
    append_action: str = "OVERWRITE_IF_EXISTS_OR_ADD",
    *,
    is_early: bool = False,
) -> None:
    """Have Envoy set a request's header in its first filter, or before all filters."""
    header = {"key": name, "value": value}
    mutations = [{"append": {"header": header, "append_action": append_action}}]
    manager = connection_manager(bootstrap)
    if is_early:
        kind = "http.early_header_mutation.header_mutation.v3.HeaderMutation"
        config: dict[str, Any] = {"mutations": mutations}
        extensions = manager.setdefault("early_header_mutation_extensions", [])
        at = len(extensions)
    else:
        kind = "filters.http.header_mutation.v3.HeaderMutation"
        config = {"mutations": {"request_mutations": mutations}}
        extensions, at = manager["http_filters"], 0
    typed = {"@type": f"type.googleapis.com/envoy.extensions.{kind}", **config}
    extensions.insert(at, {"name": "gateway", "typed_config": typed})


class EnvoyProcess(Envoy):
    """An Envoy process, with questions that tests ask it."""

    async def has_checked_router(self) -> bool:
        """Return whether a health check of the router has succeeded."""
        name = "cluster.router.health_check.success"
        return (await self.stats(name)).get(name, 0) > 0

    async def considers_healthy(self, *addresses: str, cluster: str = "router") -> bool:
        """Return whether Envoy considers all of these endpoints of a cluster healthy."""
        page = await self.admin("/clusters")
        return all(f"{cluster}::{each}::health_flags::healthy\n" in page for each in addresses)


class RouterProcess(ServeProcess):
    """A router process, with questions that tests ask it.

    Args:
        config: The configuration file's content; addresses are filled in.
        address: Of the gRPC services, where others must know it beforehand.
    """

    def __init__(self, config: Mapping[str, Any], *, address: str = "") -> None:
        log = {"level": "info", "json_lines": False}
        super().__init__({**config, "log": log}, address=address, name="router")

    async def start(self, *, within_s: float = 90.0) -> None:
        """Start or restart; return once it is ready.

        Raises:
            AssertionError: It ended or did not become ready; with its log.
        """
        try:
            await super().start(within_s=within_s)
        except StackError as error:
            raise AssertionError(str(error)) from error

    @property
    def config_path(self) -> Path:
        """The configuration file that it follows."""
        return self._config_path

    def change_config(self, **sections: Any) -> None:
        """Replace sections of the file that it follows."""
        document = yaml.safe_load(self._config_path.read_text())
        changed = self._config_path.with_suffix(".new")
        changed.write_text(yaml.safe_dump({**document, **sections}))
        changed.replace(self._config_path)

    async def admin(self, path: str) -> Any:
        """GET from the admin port: parsed where it is JSON, else text."""
        url = f"{self.admin_url}{path}"
        async with aiohttp.ClientSession() as http, http.get(url) as response:
            is_json = response.content_type == "application/json"
            return await (response.json() if is_json else response.text())

    async def counter(self, name: str) -> float:
        """Return the sum of a counter of /metrics over all labels."""
        page: str = await self.admin("/metrics")
        lines = [line for line in page.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
        assert lines, f"no {name} in {page}"
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    async def has_none_in_flight(self) -> bool:
        """Return whether the router counts no request as in flight."""
        return not any((await self.in_flight()).values())

    async def admin_status(self, path: str) -> int:
        """Return the HTTP status of a path of the admin port."""
        url = f"{self.admin_url}{path}"
        async with aiohttp.ClientSession() as http, http.get(url) as response:
            return response.status

    async def in_flight(self) -> dict[str, int]:
        """Return how many requests the router counts on each endpoint, by address."""
        snapshot = await self.admin("/debug/snapshot")
        return {view["address"]: view["num_in_flight"] for view in snapshot["endpoints"]}


@dataclass(frozen=True)
class Answer:
    """One HTTP response, read to its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def served_by(self) -> str:
        """The name of the pod that responded; "" where Envoy or the router did."""
        return self.headers.get("x-served-by", "")

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error_code(self) -> object:
        """The `code` of an OpenAI-shaped error, whose whole shape is checked."""
        assert self.headers["content-type"].partition(";")[0] == "application/json"
        error = self.json["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["message"]
        return error["code"]


def chat(model: str, *, padding_bytes: int = 0, is_model_last: bool = False, **more: Any) -> bytes:
    """The body of a chat completion request; the padding is in a field that engines ignore."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **more}
    body["padding"] = "x" * padding_bytes
    body = {**body, "model": model} if is_model_last else {"model": model, **body}
    return json.dumps(body).encode()


class Client:
    """An HTTP client of one base URL that sends paths unchanged."""

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
        """Send a request; the content type is JSON unless `headers` has another."""
        all_headers = CIMultiDict(headers)
        if body is not None:
            all_headers.setdefault("content-type", "application/json")
        # aiohttp warns about large bodies passed as bytes.
        data = io.BytesIO(body) if isinstance(body, bytes) else body
        async with self._http.request(
            method, URL(self._url + path, encoded=True), data=data, headers=all_headers
        ) as response:
            return Answer(response.status, dict(lower(response.headers)), await response.read())

    async def chat(
        self, model: str, *, headers: Mapping[str, str] = MappingProxyType({}), **body: Any
    ) -> Answer:
        """Send a chat completion request for `model`."""
        return await self.request("POST", "/v1/chat/completions", chat(model, **body), headers)

    async def served(self, model: str, **body: Any) -> Answer:
        """Return the answer to a streamed chat completion, which has to be a 200."""
        answer = await self.chat(model, stream=True, **body)
        assert answer.status == 200, answer.body
        return answer

    async def ask(self, num: int, *models: str, num_clients: int = 8, **body: Any) -> list[Answer]:
        """Send so many requests, for these models in turn, by clients without pause."""
        numbers, answers = iter(range(num)), list[Answer]()

        async def go_on() -> None:
            for number in numbers:
                answers.append(await self.chat(models[number % len(models)], **body))

        await asyncio.gather(*(go_on() for _ in range(num_clients)))
        return answers

    @asynccontextmanager
    async def streaming(
        self, model: str, *, headers: Mapping[str, str] = MappingProxyType({}), **body: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A streamed chat completion whose first token has come."""
        async with self._http.post(
            f"{self._url}/v1/chat/completions",
            data=chat(model, stream=True, **body),
            headers={"content-type": "application/json", **headers},
            timeout=aiohttp.ClientTimeout(total=200),
        ) as response:
            assert response.status == 200, await response.read()
            first = await response.content.readuntil(b"\n\n")
            assert first.startswith(b"data: {")
            yield response


def lower(headers: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The same headers with their names in lower case."""
    return ((name.lower(), value) for name, value in headers.items())


async def raw_request(port: int, data: bytes, *, within_s: float = 60.0) -> Answer:
    """Send bytes as they are, also those that no HTTP client would send."""
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
    port: int, body: bytes, *, has_trailers: bool = False, within_s: float = 60.0
) -> Answer:
    """Post JSON to the chat completions path over HTTP/2, optionally with trailers."""
    async with asyncio.timeout(within_s):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            return await _H2Exchange(reader, writer).post(body, has_trailers=has_trailers)
        finally:
            writer.close()


class _H2Exchange:
    """One request on its own connection."""

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
