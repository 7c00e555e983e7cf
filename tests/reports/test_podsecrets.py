"""Keys and authorities of pods that change while the router runs."""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
from aiohttp import web
from yarl import URL

from extproc.files.tls import client_context
from extproc.reports.podclient import PodClient
from extproc.reports.podsecrets import PodSecrets
from tests.pki import Pki
from tests.servers import web_server


def replace_file(path: Path, text: str) -> None:
    """As Kubernetes does it: another file is put in its place."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


class Locked:
    """A pod that wants a key, and notes which it got."""

    def __init__(self, *keys: str) -> None:
        self.keys = set(keys)
        self.seen: list[str] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(request.headers.get("Authorization", "").removeprefix("Bearer "))
        is_right = self.seen[-1] in self.keys
        return web.Response(status=200 if is_right else 401, text=await request.text())

    @asynccontextmanager
    async def server(self) -> AsyncIterator[URL]:
        async with web_server(self.answer) as url:
            yield URL(f"{url}/v1/models")


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    (tmp_path / "key").write_text("old\n")
    return tmp_path / "key"


async def statuses(*clients_and_urls: tuple[PodClient, URL]) -> list[int]:
    return [(await client.get(url, max_bytes=100))[0] for client, url in clients_and_urls]


async def test_a_key_that_changes_pod_by_pod_is_the_right_one_for_each(key_file: Path) -> None:
    """Read as soon as one is refused, also by clients that were there before, and no sooner."""
    secrets, first, second = PodSecrets(key_file), Locked("old"), Locked("old")
    async with first.server() as url, second.server() as other_url:
        with (
            closing(PodClient(None, None, secrets)) as client,
            closing(PodClient(None, None, secrets)) as other,
        ):
            pairs = ((client, url), (other, other_url))
            assert await statuses(*pairs) == [200, 200]
            replace_file(key_file, "new\n")
            assert await statuses(*pairs) == [200, 200]
            first.keys = {"new"}
            assert await statuses(*pairs, *pairs) == [200] * 4
            with closing(PodClient(None, None, secrets)) as late:
                assert await statuses((late, other_url), (late, other_url)) == [200, 200]
            second.keys = {"new"}
            assert await statuses(*pairs) == [200, 200]

    assert first.seen == ["old", "old", "old", "new", "new", "new"]
    assert second.seen == ["old"] * 4 + ["new", "old", "old"] + ["old", "new"]


async def test_calls_that_change_something_find_the_right_key_too(key_file: Path) -> None:
    """Each begins with the present key: one client calls all pods."""
    secrets, old, new = PodSecrets(key_file), Locked("old"), Locked("new")
    replace_file(key_file, "new")
    async with old.server() as url, new.server() as other_url:
        with closing(PodClient(None, None, secrets)) as client:
            answers = [
                await client.ask("POST", each, {"lora_name": "sql"}, max_bytes=100)
                for each in (url, other_url, url)
            ]

    assert [each.status for each in answers] == [200] * 3
    assert {each.body for each in answers} == {b'{"lora_name": "sql"}'}
    assert old.seen == ["old", "new", "old"]
    assert new.seen == ["old", "new"]


async def test_a_pod_that_refuses_every_key_is_a_failure_as_before(key_file: Path) -> None:
    secrets, pod = PodSecrets(key_file), Locked()
    replace_file(key_file, "new")
    async with pod.server() as url:
        with closing(PodClient(None, None, secrets)) as client:
            assert await statuses((client, url), (client, url)) == [401, 401]
            assert (await client.ask("GET", url, max_bytes=100)).status == 401
        with closing(PodClient()) as client:
            assert await statuses((client, url)) == [401]

    assert pod.seen == ["old", "new", "old", "new", "new", "old", ""]


async def test_a_file_that_cannot_be_used_leaves_the_last_key_and_is_reported_once(
    key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secrets = PodSecrets(key_file)
    for text in ("", "two\nlines\n"):
        replace_file(key_file, text)
        for _ in range(2):
            secrets.reread()
        assert secrets.keys == ("old",)
    assert len(caplog.records) == 2
    key_file.unlink()
    secrets.reread()
    replace_file(key_file, "new\n")
    secrets.reread()

    assert secrets.keys == ("new", "old")
    assert not any("new" in record.getMessage() for record in caplog.records)


async def test_the_authority_of_pods_that_changes_is_trusted_at_once(tmp_path: Path) -> None:
    """The former one stays trusted: pods are replaced one by one. Both have the same name."""
    contexts, authorities = {}, {}
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        pki = Pki(tmp_path / name)
        contexts[name] = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        contexts[name].load_cert_chain(*pki.issue("pod", "127.0.0.1"))
        authorities[name] = pki.ca.read_text()
    ca_file = tmp_path / "ca.pem"
    ca_file.write_text(authorities["old"])
    secrets = PodSecrets(None, ca_file, lambda: client_context(ca_file, verify=True))
    pod = Locked("")

    async with (
        web_server(pod.answer, tls=contexts["old"]) as old,
        web_server(pod.answer, tls=contexts["new"]) as new,
    ):
        with (
            closing(PodClient(None, None, secrets)) as to_old,
            closing(PodClient(None, None, secrets)) as to_new,
        ):
            pairs = ((to_old, URL(f"{old}/")), (to_new, URL(f"{new}/")))
            with pytest.raises(ssl.SSLError):
                await statuses(*pairs)
            replace_file(ca_file, authorities["new"])
            assert await statuses(*pairs) == [200, 200]
            with closing(PodClient(None, None, secrets)) as late:
                assert await statuses((late, URL(f"{old}/"))) == [200]


@pytest.mark.parametrize(("name", "is_pod"), [("localhost", True), ("other", False), (None, False)])
async def test_pods_are_known_by_a_name_where_their_certificates_lack_their_addresses(
    tmp_path: Path, name: str | None, *, is_pod: bool
) -> None:
    pki = Pki(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*pki.issue("pod"))
    secrets = PodSecrets(None, pki.ca, lambda: client_context(pki.ca), tls_name=name)
    async with web_server(Locked("").answer, tls=context) as url:
        with closing(PodClient(None, None, secrets)) as client:
            if is_pod:
                assert await statuses((client, URL(f"{url}/"))) == [200]
            else:
                with pytest.raises(ssl.SSLCertVerificationError):
                    await statuses((client, URL(f"{url}/")))
