"""Requests to a Kubernetes API server, as a pod's service account or by a kubeconfig.

Authentication is left to kubernetes_asyncio. It is generated for every release of Kubernetes and
uses aiohttp as we do. It handles rotated tokens, kubeconfigs with client certificates, exec plugins
(EKS, GKE, AKS), OIDC, proxies and server names. Its models, its watch and its connections are not
used. It turns a Pod into some sixty Python objects, of which five fields are needed. Its watch has
no deadline and cannot tell a broken connection from a completed watch. The alternatives: `kr8s` and
`lightkube` use httpx, a second HTTP client in the process; `kubernetes`, the official one, blocks.

Credentials are read again after a 401 and after a failed TLS handshake, in addition to the token's
own renewal. So a rotated CA or an expired exec credential needs no restart.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import aiohttp

from extproc.discovery.kubernetes.objectstore import ApiError, refusal
from extproc.errors import ExtprocError, needs_extra
from extproc.files.reading import check_readable, describe_failure, read_text
from extproc.files.refusals import tls_failure
from extproc.files.tls import client_context

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Source: kubernetes.io/docs/tasks/run-application/access-api-from-pod."""
RESPONSE_S = 30.0
"""Seconds for the whole response to a list, and for the start of one to a watch."""
CONNECT_S = 5.0
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
"""Seconds of silence of a watch until the kernel asks whether the server is there, and between two
questions; and how many go unanswered: so it is noticed within 11 s if its node is gone."""
MAX_MESSAGE_BYTES = 4096
"""Length of an error's body; the rest is not read."""
MAX_RESPONSE_BYTES = 16 * 1024 * 1024
"""Length of one page of a list; 250 pods are some 5 MB. Longer ones are asked for in parts."""
MAX_LINE_BYTES = 8 * 1024 * 1024
"""Length of one event of a watch; etcd's limit is 1.5 MiB (--max-request-bytes)."""
READ_BUFFER_BYTES = 2 * 1024 * 1024
"""Read ahead, of one response: an event of a large object is one read."""
_FAILURES = (aiohttp.ClientError, OSError)


class MissingLibraryError(ExtprocError):
    """kubernetes_asyncio is not installed; the message has the command."""


def load_library(what: str) -> Any:
    """Return kubernetes_asyncio.

    Args:
        what: The setting that needs it, for the message.

    Raises:
        MissingLibraryError: It is not installed.
    """
    try:
        import kubernetes_asyncio.client
        import kubernetes_asyncio.config
    except ImportError as error:
        raise MissingLibraryError(needs_extra(what, "kubernetes", error)) from error
    return kubernetes_asyncio


@dataclass(slots=True)
class _Access:
    """Credentials as they were read, and the connections that were made with them."""

    configuration: Any
    session: aiohttp.ClientSession
    namespace: str
    token: Path | None
    num_users: int = 0


class KubernetesClient:
    """One API server. Belongs to one event loop.

    Args:
        kubeconfig: A kubeconfig file. None: the pod's service account where there is one, else
            what KUBECONFIG names, else `~/.kube/config`.
        service_account: The mounted folder of a pod's account.

    Attributes:
        known_namespace: Our own namespace as last read; empty before.
        refusal: Why TLS keeps us from the API server, for people; "" if it does not.

    Raises:
        MissingLibraryError: The extra `kubernetes` is not installed.
    """

    def __init__(
        self, kubeconfig: Path | None = None, *, service_account: Path = SERVICE_ACCOUNT
    ) -> None:
        self._library = load_library("the Kubernetes API")
        self._kubeconfig = kubeconfig
        self._service_account = service_account
        self._access: _Access | None = None
        self._connecting = asyncio.Lock()
        self.known_namespace = ""
        self.refusal = ""

    async def namespace(self) -> str:
        """Return our own: the service account's, or that of the kubeconfig's context.

        Raises:
            ApiError: The credentials cannot be read.
        """
        return (await self._connect()).namespace

    async def get(self, path: str, parameters: Mapping[str, str]) -> bytes:
        """GET a path; return the body.

        Raises:
            ApiError: On any failure.
        """
        return await self._body(path, parameters)

    async def apply(self, path: str, manager: str, body: Mapping[str, Any]) -> bytes:
        """Apply a part of an object as a field manager; return the object.

        Fields that the manager set before and does not set now are removed. Fields of other
        managers stay, unless this sets them.

        Raises:
            ApiError: As `get`.
        """
        return await self._body(path, {"fieldManager": manager, "force": "true"}, body)

    async def watch(
        self, path: str, parameters: Mapping[str, str], *, within_s: float
    ) -> AsyncGenerator[list[bytes], None]:
        """GET a stream of lines; yield them in batches as they arrive, incomplete lines never.

        The first batch is empty: the response has begun. Ends when the server ends the response.

        Args:
            within_s: Longest response: a connection may break without notice.

        Raises:
            ApiError: As `get`.
        """
        async with self._use() as access:
            async with asyncio.timeout(RESPONSE_S):
                response = await self._request(access, path, parameters)
            _keep_alive(response)
            async with asyncio.timeout(within_s), response:
                yield []
                rest, num_bytes = list[bytes](), 0
                try:
                    async for chunk in response.content.iter_any():
                        *lines, last = chunk.split(b"\n")
                        if lines:
                            yield [b"".join([*rest, lines[0]]), *lines[1:]]
                            rest, num_bytes = [], 0
                        rest.append(last)  # joined once: pieces may be small
                        num_bytes += len(last)
                        if num_bytes > MAX_LINE_BYTES:
                            raise _too_long(MAX_LINE_BYTES)
                finally:
                    _abort(response)

    async def aclose(self) -> None:
        """Close all connections."""
        access, self._access = self._access, None
        if access is not None:
            await access.session.close()

    async def _body(
        self, path: str, parameters: Mapping[str, str], applied: Mapping[str, Any] | None = None
    ) -> bytes:
        async with (
            self._use() as access,
            asyncio.timeout(RESPONSE_S),
            await self._request(access, path, parameters, applied) as response,
        ):
            return await _read(response)

    @asynccontextmanager
    async def _use(self) -> AsyncIterator[_Access]:
        """Keep the credentials' connections open, though others have the credentials read again.

        Raises:
            ApiError: On any failure of the request.
        """
        access = await self._connect()
        access.num_users += 1
        try:
            yield access
        except _FAILURES as error:
            raise self._failure(access, error) from error
        finally:
            access.num_users -= 1
            if access is not self._access and not access.num_users:
                await access.session.close()

    async def _request(
        self,
        access: _Access,
        path: str,
        parameters: Mapping[str, str],
        applied: Mapping[str, Any] | None = None,
    ) -> aiohttp.ClientResponse:
        try:
            if access.token is not None and access.token.exists():
                check_readable(access.token)  # the library would open any file
            token = await access.configuration.get_api_key_with_prefix("BearerToken")
        except Exception as error:  # a token is read again from time to time
            raise ApiError("credentials", f"credentials: {error}") from error
        headers = {
            "Accept": "application/json",
            "Accept-Encoding": "identity",  # the network is near, and CPU scarce
            "User-Agent": "extproc",
        }
        if token:
            headers["Authorization"] = token
        if applied is not None:
            headers["Content-Type"] = "application/apply-patch+yaml"  # JSON is YAML
        configuration = access.configuration
        query = f"?{urlencode(parameters)}" if parameters else ""
        response = await access.session.request(
            "GET" if applied is None else "PATCH",
            configuration.host + path + query,
            headers=headers,
            data=None if applied is None else json.dumps(applied),
            proxy=configuration.proxy,
            proxy_headers=configuration.proxy_headers,
            server_hostname=configuration.tls_server_name,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        )
        self.refusal = ""
        if response.status != HTTPStatus.OK:
            async with response:
                raise await self._refusal(access, response)
        return response

    async def _refusal(self, access: _Access, response: aiohttp.ClientResponse) -> ApiError:
        body = await response.content.read(MAX_MESSAGE_BYTES)
        if response.status == HTTPStatus.UNAUTHORIZED:
            self._discard(access)
        return refusal(response.status, body, response.headers.get("Retry-After", ""))

    def _failure(self, access: _Access, error: Exception) -> ApiError:
        if isinstance(error, TimeoutError):
            return ApiError("timeout", "timed out")
        if isinstance(error, aiohttp.ClientSSLError):
            self._discard(access)
        trust = f"{access.token.parent}/ca.crt" if access.token else "the kubeconfig"
        if said := tls_failure(error, trust=trust):
            self.refusal = f"API server {access.configuration.host}: {said}"
            return ApiError("connection", self.refusal)
        return ApiError("connection", str(error) or type(error).__name__)

    async def _connect(self) -> _Access:
        async with self._connecting:
            if self._access is None:
                try:
                    self._access = await self._load()
                except Exception as error:  # files, plugins, and commands of plugins
                    raise ApiError("credentials", f"credentials: {error}") from error
                self.known_namespace = self._access.namespace
            return self._access

    def _discard(self, access: _Access) -> None:
        """Have the next request read the credentials again; those under way go on."""
        if self._access is access:
            self._access = None

    async def _load(self) -> _Access:
        configuration = self._library.client.Configuration()
        in_cluster = bool(os.environ.get("KUBERNETES_SERVICE_HOST"))
        token = self._service_account / "token"
        is_account = self._kubeconfig is None and in_cluster and token.exists()
        if is_account:
            check_readable(token, self._service_account / "ca.crt")
            self._library.config.load_incluster_config(
                configuration,
                token_filename=str(token),
                cert_filename=str(self._service_account / "ca.crt"),
            )
            namespace = read_text(self._service_account / "namespace").strip()
            source = str(self._service_account)
        else:
            source = "the kubeconfig"
            path = self._kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
            for each in os.path.expanduser(path).split(os.pathsep):  # as in kubectl
                if os.path.exists(each):
                    check_readable(Path(each))
            loader = await self._library.config.load_kube_config(
                config_file=os.path.expanduser(path),
                client_configuration=configuration,
                persist_config=False,
            )
            context = (loader.current_context or {}).get("context", {})
            namespace = context.get("namespace") or "default"
        session = _session(configuration, source)
        return _Access(configuration, session, namespace, token if is_account else None)


def _session(configuration: Any, source: str) -> aiohttp.ClientSession:
    """Return a session with the TLS of the library's configuration, made as all of ours.

    Raises:
        OSError: A file cannot be used.
    """
    ca_file, certificate, key = (
        Path(each) if each else None
        for each in (configuration.ssl_ca_cert, configuration.cert_file, configuration.key_file)
    )
    try:
        context = client_context(
            ca_file, verify=configuration.verify_ssl, certificate=certificate, key=key
        )
    except ssl.SSLError as error:
        # Files of the library's, where a kubeconfig has the content itself.
        what = "CA, or client certificate and key"
        raise OSError(f"{source}: its {what}: {describe_failure(error)}") from error
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=configuration.connection_pool_maxsize, ssl=context),
        trust_env=True,  # proxies
        read_bufsize=READ_BUFFER_BYTES,
    )


def _keep_alive(response: aiohttp.ClientResponse) -> None:
    """Have the kernel ask whether the server is there, as a watch sends nothing."""
    transport = None if response.connection is None else response.connection.transport
    if transport is None:  # ended already
        return
    found = transport.get_extra_info("socket")
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):  # macOS has the first under another name, and a default
            found.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def _read(response: aiohttp.ClientResponse) -> bytes:
    chunks, num_bytes = [], 0
    async for chunk in response.content.iter_any():
        chunks.append(chunk)
        num_bytes += len(chunk)
        if num_bytes > MAX_RESPONSE_BYTES:
            _abort(response)
            raise _too_long(MAX_RESPONSE_BYTES)
    return b"".join(chunks)


def _too_long(limit_bytes: int) -> ApiError:
    return ApiError("too_long", f"response longer than {limit_bytes} bytes")


def _abort(response: aiohttp.ClientResponse) -> None:
    """Close an unfinished response's connection without TLS's close_notify: a silent peer would
    delay it by half a minute.
    """
    if response.connection is not None and response.connection.transport is not None:
        response.connection.transport.abort()
