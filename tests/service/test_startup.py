"""The checks of the start: `check-config` and `serve` refuse the same, in the same words."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives import serialization
from typer.testing import Result

from extproc.address import MAX_UNIX_PATH_BYTES
from extproc.commands.epp import run
from extproc.config.configfile import ConfigError
from extproc.observe import logs
from extproc.service.app import App
from extproc.stack.processes import free_port
from tests.commandline import invoke
from tests.logs import warnings
from tests.peers.peered import KEY_FILE
from tests.pki import KINDS, Kind, Pki, make
from tests.waiting import eventually

PATIENCE_S = 60.0
NOT_OURS = "192.0.2.1"
"""Reserved for documentation (RFC 5737): nobody's address."""


class Files:
    """What configurations name.

    Attributes:
        folder: Where they are.
        cert, key, ca: A pair and its authority.
        other_key: Another's.
        garbage: A file that is none of it.
        fifo: Opening it would wait.
        busy: A port in use.
        free: A port that is not.
    """

    def __init__(self, folder: Path, busy: int) -> None:
        self.free = free_port()
        pki = Pki(folder)
        self.folder, self.busy, self.ca = folder, busy, pki.ca
        self.cert, self.key = pki.issue("ours")
        _, self.other_key = pki.issue("other")
        self.garbage = self.write("garbage", "garbage")
        self.fifo = folder / "fifo"
        os.mkfifo(self.fifo)

    def write(self, name: str, text: str) -> Path:
        (self.folder / name).write_text(text)
        return self.folder / name

    def der(self) -> Path:
        (self.folder / "der").write_bytes(ssl.PEM_cert_to_DER_cert(self.ca.read_text()))
        return self.folder / "der"

    def encrypt_key(self) -> Path:
        key = serialization.load_pem_private_key(self.key.read_bytes(), None)
        path = self.folder / "encrypted"
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.BestAvailableEncryption(b"secret"),
            )
        )
        return path


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield Files(tmp_path, taken.getsockname()[1])


@pytest.fixture(autouse=True)
def _serves_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service ends as soon as it has begun."""
    original = App.run

    async def run_and_stop(self: App) -> None:
        running = asyncio.ensure_future(original(self))
        await eventually(lambda: self.admin_address and not running.done())
        self.stop()
        await running

    monkeypatch.setattr(App, "run", run_and_stop)
    monkeypatch.setattr(logs, "configure_logging", lambda *_, **__: None)


def both(files: Files, sections: dict[str, Any]) -> tuple[Result, Result]:
    """How `check-config` and `serve` end."""
    document: dict[str, Any] = {
        "server": {"address": "127.0.0.1:0"},
        "admin": {"address": "127.0.0.1:0"},
        "discovery": {"static": ["127.0.0.1:1"]},
    }
    for name, section in sections.items():
        is_part = isinstance(section, dict) and name in ("server", "admin")
        document[name] = {**document[name], **section} if is_part else section
    config = files.write("extproc.yaml", yaml.safe_dump(document))
    check, serve = (
        invoke(command, "--config", str(config)) for command in ("check-config", "serve")
    )
    return check, serve


def tls(files: Files, **others: Path) -> dict[str, Any]:
    named = {"cert_file": files.cert, "key_file": files.key, **others}
    return {"tls": {name: str(path) for name, path in named.items()}}


MISSING = Path("/nonexistent/file")

BAD: dict[str, tuple[Callable[[Files], dict[str, Any]], str]] = {
    "certificate missing": (
        lambda f: {"server": tls(f, cert_file=MISSING)},
        "server.tls.cert_file: /nonexistent/file: No such file or directory",
    ),
    "key missing": (
        lambda f: {"server": tls(f, key_file=MISSING)},
        "server.tls.key_file: /nonexistent/file: No such file or directory",
    ),
    "client CA missing": (
        lambda f: {"server": tls(f, client_ca_file=MISSING)},
        "server.tls.client_ca_file: /nonexistent/file: No such file or directory",
    ),
    "certificate garbage": (
        lambda f: {"server": tls(f, cert_file=f.garbage)},
        "are not a certificate and its private key",
    ),
    "key garbage": (
        lambda f: {"server": tls(f, key_file=f.garbage)},
        "are not a certificate and its private key",
    ),
    "another's key": (
        lambda f: {"server": tls(f, key_file=f.other_key)},
        "are not a certificate and its private key: they do not belong together",
    ),
    "certificate and key swapped": (
        lambda f: {"server": tls(f, cert_file=f.key, key_file=f.cert)},
        "server.tls: cert_file and key_file are swapped",
    ),
    "encrypted key": (
        lambda f: {"server": tls(f, key_file=f.encrypt_key())},
        "the private key is encrypted",
    ),
    "tokens missing": (
        lambda f: {
            "adapters": {
                "store": {"directory": {"path": str(f.folder)}},
                "registration": {"token_file": str(MISSING)},
            }
        },
        "adapters.registration.token_file: /nonexistent/file: No such file or directory",
    ),
    "password missing": (
        lambda f: {
            "adapters": {
                "store": {"redis": {"url": "redis://127.0.0.1:1", "password_file": str(MISSING)}}
            }
        },
        "adapters.store.redis.password_file: /nonexistent/file: No such file or directory",
    ),
    "client CA garbage": (
        lambda f: {"server": tls(f, client_ca_file=f.garbage)},
        "server.tls.client_ca_file: ",
    ),
    "certificate that does not end": (
        lambda f: {"server": tls(f, cert_file=f.fifo)},
        "fifo: not a regular file",
    ),
    "pods' CA missing": (
        lambda f: {"pods": {"tls": True, "ca_file": str(MISSING)}},
        "pods.ca_file: /nonexistent/file: No such file or directory",
    ),
    "pods' CA garbage": (
        lambda f: {"pods": {"tls": True, "ca_file": str(f.garbage)}},
        "pods.ca_file: ",
    ),
    "pods' CA in DER": (
        lambda f: {"pods": {"tls": True, "ca_file": str(f.der())}},
        "der: there is no certificate in it: it must be PEM, with -----BEGIN CERTIFICATE-----",
    ),
    "pods' CA cut off": (
        lambda f: {"pods": {"tls": True, "ca_file": str(f.write("cut", f.ca.read_text()[:99]))}},
        "cut: a certificate in it is damaged, or cut off: copy it anew",
    ),
    "store's CA garbage": (
        lambda f: {
            "adapters": {"store": {"redis": {"url": "rediss://r", "ca_file": str(f.garbage)}}}
        },
        "adapters.store.redis.ca_file: ",
    ),
    "API key missing": (
        lambda f: {"pods": {"api_key_file": str(MISSING)}},
        "pods.api_key_file: /nonexistent/file: No such file or directory",
    ),
    "API key a folder": (
        lambda f: {"pods": {"api_key_file": str(f.folder)}},
        "not a regular file",
    ),
    "API key of two lines": (
        lambda f: {"pods": {"api_key_file": str(f.write("key", "a\nb"))}},
        "must be one line of printable ASCII",
    ),
    "API key empty": (
        lambda f: {"pods": {"api_key_file": str(f.write("key", "\n"))}},
        "key: empty",
    ),
    "path without a slash": (lambda f: {"request": {"paths": ["v1/x"]}}, "request.paths: "),
    "path of the root": (lambda f: {"request": {"paths": ["/"]}}, "request.paths: "),
    "path with a wildcard": (
        lambda f: {"request": {"paths": ["/v1/*"]}},
        "request.paths: ",
    ),
    "path of the models": (lambda f: {"request": {"paths": ["/v1/models"]}}, "request.paths: "),
    "pod with port 0": (
        lambda f: {"discovery": {"static": ["10.0.0.7:0"]}},
        "discovery.static.0.address: ",
    ),
    "pod with a name": (
        lambda f: {"discovery": {"static": ["localhost:8000"]}},
        "discovery.dns does",
    ),
    "port too large": (lambda f: {"server": {"address": "127.0.0.1:99999"}}, "server.address: "),
    "address not ours": (
        lambda f: {"server": {"address": f"{NOT_OURS}:9002"}},
        f"server.address: {NOT_OURS}:9002: Cannot assign requested address",
    ),
    "admin address not ours": (
        lambda f: {"admin": {"address": f"{NOT_OURS}:0"}},
        f"admin.address: {NOT_OURS}:0: Cannot assign requested address",
    ),
    "metrics address not ours": (
        lambda f: {"admin": {"metrics_address": f"{NOT_OURS}:0"}},
        f"admin.metrics_address: {NOT_OURS}:0: Cannot assign requested address",
    ),
    "health address not ours": (
        lambda f: {"server": {"health_address": f"{NOT_OURS}:0"}},
        f"server.health_address: {NOT_OURS}:0: Cannot assign requested address",
    ),
    "address that is no name": (
        lambda f: {"server": {"address": f"{'a' * 70}:9002"}},
        "server.address: ",
    ),
    "one address for two": (
        lambda f: {
            "server": {"address": f"127.0.0.1:{f.free}"},
            "admin": {"address": f"0.0.0.0:{f.free}"},
        },
        "already used by server.address",
    ),
    "socket in no folder": (
        lambda f: {"server": {"address": "unix:/nonexistent/socket"}},
        "server.address: unix:/nonexistent/socket: No such file or directory",
    ),
    "socket in a file": (
        lambda f: {"server": {"address": f"unix:{f.garbage}/socket"}},
        "Not a directory",
    ),
    "socket where a file is": (
        lambda f: {"server": {"address": f"unix:{f.garbage}"}},
        "exists and is not a socket",
    ),
    "socket with a long path": (
        lambda f: {"server": {"address": f"unix:{f.folder}/{'x' * 100}"}},
        f"longer than {MAX_UNIX_PATH_BYTES} bytes",
    ),
    "setting misspelt": (
        lambda f: {"server": {"addres": "x"}},
        "server.addres: unknown; allowed: address",
    ),
    "policy unknown": (
        lambda f: {"policy": {"name": "nope"}},
        "policy nope: unknown; allowed: founding",
    ),
    "policy's arguments": (
        lambda f: {"policy": {"name": "founding", "args": {"threshold": 0}}},
        "threshold is 0; allowed: 1 or more",
    ),
    "policy's argument as text": (
        lambda f: {"policy": {"name": "founding", "args": {"threshold": "3"}}},
        "policy founding: threshold is '3'; allowed: 1 or more, a whole number",
    ),
    "policy's argument misspelt": (
        lambda f: {"policy": {"name": "founding", "args": {"treshold": 3}}},
        "policy founding: args: treshold: unknown; allowed: threshold",
    ),
    "policy with the name of an emoji": (
        lambda f: {"policy": {"name": ":x:"}},
        "policy :x:: cannot be imported",
    ),
    "policy not importable": (
        lambda f: {"policy": {"name": "no.such:Policy"}},
        "policy no.such:Policy: cannot be imported",
    ),
    "peers' port": (
        lambda f: {"peers": {"dns": "routers", "key_file": str(KEY_FILE)}},
        "peers.port: must be given where server.address has no fixed port",
    ),
    "peers' CA missing": (
        lambda f: {
            "server": tls(f),
            "peers": {
                "static": ["127.0.0.1:1"],
                "key_file": str(KEY_FILE),
                "ca_file": str(MISSING),
            },
        },
        "peers.ca_file: /nonexistent/file: No such file or directory",
    ),
    "peers' CA garbage": (
        lambda f: {
            "server": tls(f),
            "peers": {
                "static": ["127.0.0.1:1"],
                "key_file": str(KEY_FILE),
                "ca_file": str(f.garbage),
            },
        },
        "peers: ",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_serve_refuses_check_config_refuses_in_the_same_words(name: str, files: Files) -> None:
    sections, message = BAD[name]
    check, serve = both(files, sections(files))

    assert (check.exit_code, serve.exit_code) == (2, 2)
    assert serve.exception is None or isinstance(serve.exception, SystemExit)
    assert check.stderr == serve.stderr
    assert message in check.stderr
    assert check.stdout == ""
    [line] = check.stderr.splitlines()
    assert line.startswith("extproc: ")


def test_all_errors_are_reported_at_once(files: Files) -> None:
    bad = {"server": tls(files, key_file=MISSING), "pods": {"api_key_file": str(MISSING)}}
    check, serve = both(files, bad)

    assert check.stderr == serve.stderr
    assert [line.split(": ")[1] for line in check.stderr.splitlines()] == [
        "server.tls.key_file",
        "pods.api_key_file",
    ]


GOOD: dict[str, Callable[[Files], dict[str, Any]]] = {
    "the least": lambda f: {},
    "tls": lambda f: {"server": tls(f)},
    "mutual tls": lambda f: {"server": tls(f, client_ca_file=f.ca)},
    "peers": lambda f: {
        "server": tls(f),
        "peers": {"static": ["127.0.0.1:1"], "key_file": str(KEY_FILE)},
    },
    "pods": lambda f: {
        "pods": {"tls": True, "ca_file": str(f.ca), "api_key_file": str(f.write("key", "a-b\n"))}
    },
    "socket": lambda f: {"server": {"address": f"unix:{f.folder}/socket"}},
    "free ports": lambda f: {
        "server": {"health_address": "127.0.0.1:0"},
        "admin": {"metrics_address": "127.0.0.1:0"},
    },
    "paths": lambda f: {"request": {"paths": ["/v1/completions", "/own/path"]}},
    "tracing": lambda f: {"tracing": {"enabled": True}},
    "names": lambda f: {
        "discovery": {"dns": {"name": "pods.invalid", "port": 8000, "nameservers": ["127.0.0.1:9"]}}
    },
    "a file of pods": lambda f: {"discovery": {"file": str(f.write("pods", "[]"))}},
}


@pytest.mark.parametrize("name", GOOD)
def test_what_check_config_passes_serve_starts_with(
    name: str, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    check, serve = both(files, GOOD[name](files))

    assert (check.exit_code, check.stderr) == (0, "")
    assert (serve.exit_code, serve.exception) == (0, None)


WAITED_FOR: dict[str, tuple[Callable[[Files], dict[str, Any]], str]] = {
    "no file yet": (
        lambda f: {"discovery": {"file": str(MISSING)}},
        "discovery.file: /nonexistent/file: No such file or directory",
    ),
    "an empty file": (
        lambda f: {"discovery": {"file": str(f.write("pods", ""))}},
        "empty; for no endpoints write []",
    ),
    "no pods": (
        lambda f: {"discovery": {"static": []}},
        "discovery.static: empty: every request will be answered with 503",
    ),
    "no kubeconfig yet": (
        lambda f: {"discovery": {"kubernetes": {"service": "vllm", "kubeconfig": str(MISSING)}}},
        "discovery.kubernetes.kubeconfig: /nonexistent/file: No such file or directory",
    ),
}


def shaped(files: Files, kind: Kind) -> dict[str, Path]:
    """The settings of a listener with a certificate of this kind."""
    trust, chain, key = make(kind).write(files.folder, "shaped")
    return {"cert_file": chain, "key_file": key, "client_ca_file": trust}


def linked(files: Files, kind: Kind, **peers: object) -> dict[str, Any]:
    """Replicas that share a certificate of this kind."""
    settings = {"static": ["127.0.0.1:1"], "key_file": str(KEY_FILE), **peers}
    return {"server": tls(files, **shaped(files, kind)), "peers": settings}


def of(name: str) -> Kind:
    (found,) = [kind for kind in KINDS if kind.name == name]
    return found


REFUSED: dict[str, tuple[Callable[[Files], dict[str, Any]], str]] = {
    "certificate expired": (
        lambda f: {"server": tls(f, **shaped(f, of("expired")))},
        "shaped.chain: certificate refused: it, or a CA above it, has expired: renew it",
    ),
    "certificate for clients": (
        lambda f: {"server": tls(f, **shaped(f, of("for clients alone")))},
        "shaped.chain: certificate refused: it is not for this use: reissue it with serverAuth",
    ),
    "certificate of tomorrow": (
        lambda f: {"server": tls(f, **shaped(f, of("not valid yet")))},
        "shaped.chain: certificate refused: it, or a CA above it, is not valid yet",
    ),
    "CA expired": (
        lambda f: {"pods": {"tls": True, "ca_file": str(shaped(f, of("CA expired"))[CA])}},
        "pods.ca_file: {folder}/shaped.trust: the CA 'authority' expired on ",
    ),
    "CA that is none": (
        lambda f: {"pods": {"tls": True, "ca_file": str(f.cert)}},
        "pods.ca_file: {folder}/ours.pem: there is no CA in it",
    ),
    "client CA that is none": (
        lambda f: {"server": tls(f, client_ca_file=f.cert)},
        "server.tls.client_ca_file: {folder}/ours.pem: there is no CA in it",
    ),
    "replicas of a strange CA": (
        lambda f: linked(f, of("of a strange CA")),
        "peers: a replica with the same files will not be linked: certificate refused: its issuer "
        "is not in server.tls.client_ca_file",
    ),
    "replicas with another name": (
        lambda f: linked(f, of("kubeadm"), tls_name="elsewhere", tls_verify=True),
        "for other names than elsewhere",
    ),
    "replicas whose own CA refuses them": (
        lambda f: linked(f, of("of a strange CA"), tls_verify=False),
        "is not in server.tls.client_ca_file",
    ),
    "replicas of a strange CA of peers": (
        lambda f: linked(f, of("kubeadm"), ca_file=str(f.ca)),
        "is not in peers.ca_file",
    ),
    "replicas that may not call": (
        lambda f: linked(f, of("for servers alone")),
        "is not for this use: reissue it with serverAuth, for a client clientAuth",
    ),
}
CA = "client_ca_file"


@pytest.mark.parametrize("name", REFUSED)
def test_a_certificate_that_will_be_refused_is_a_warning_with_its_file_and_the_remedy(
    name: str, files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    sections, message = REFUSED[name]
    check, serve = both(files, sections(files))

    assert (check.exit_code, serve.exit_code, serve.exception) == (0, 0, None)
    [line] = check.stderr.splitlines()
    assert message.replace("{folder}", str(files.folder)) in line
    assert line.removeprefix("extproc: warning: ") in warnings(caplog)


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if not kind.refused], ids=lambda kind: kind.name
)
def test_a_certificate_that_is_accepted_is_no_warning(kind: Kind, files: Files) -> None:
    check, _ = both(files, {"server": tls(files, **shaped(files, kind))})

    assert [line for line in check.stderr.splitlines() if "client_ca_file" not in line] == []


@pytest.mark.parametrize("name", WAITED_FOR)
def test_what_serve_waits_for_check_config_warns_of(name: str, files: Files) -> None:
    sections, message = WAITED_FOR[name]
    check, serve = both(files, sections(files))

    assert check.exit_code == 0
    assert check.stderr.startswith("extproc: warning: ")
    assert message in check.stderr
    assert (serve.exit_code, serve.exception) == (0, None)


def test_reports_that_expire_before_the_next_ones_are_a_warning_of_both(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    check, serve = both(files, {"scrape": {"interval_s": 2}})
    line = (
        "scrape.expiry_s (2) is not more than scrape.interval_s (2): the load of pods will be "
        "unknown at times; raise expiry_s to a few intervals"
    )

    assert (check.exit_code, check.stderr) == (0, f"extproc: warning: {line}\n")
    assert (serve.exit_code, serve.exception) == (0, None)
    assert line in caplog.messages


@pytest.mark.parametrize("field", ["server.address", "server.health_address", "admin.address"])
def test_an_address_in_use_is_a_warning_for_the_check_alone(field: str, files: Files) -> None:
    """The check may run beside the service whose configuration it checks."""
    section, _, key = field.partition(".")
    check, serve = both(files, {section: {key: f"127.0.0.1:{files.busy}"}})
    line = f"{field}: 127.0.0.1:{files.busy}: Address already in use"

    assert (check.exit_code, check.stderr) == (0, f"extproc: warning: {line}\n")
    assert (serve.exit_code, serve.stderr) == (2, f"extproc: {line}\n")


def test_a_file_of_cas_for_spans_that_is_none_is_named(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(files.garbage))
    check, serve = both(files, {"tracing": {"enabled": True}})

    assert (check.exit_code, serve.exit_code) == (2, 2)
    assert check.stderr == serve.stderr
    assert f"tracing: {files.garbage}: there is no certificate in it" in check.stderr


def test_the_check_takes_no_connection_and_leaves_a_running_service_s_socket(
    files: Files,
) -> None:
    path = files.folder / "socket"
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as running:
        running.bind(str(path))
        running.listen()
        before = path.stat().st_ino
        config = {"server": {"address": f"unix:{path}"}, "discovery": {"static": []}}
        file = files.write("extproc.yaml", yaml.safe_dump(config))
        check = invoke("check-config", "--config", str(file))

        assert check.exit_code == 0
        assert path.stat().st_ino == before


EXTRAS: dict[str, tuple[dict[str, Any], str, str]] = {
    "discovery.kubernetes": (
        {"discovery": {"kubernetes": {"service": "vllm"}}},
        "kubernetes_asyncio",
        "kubernetes",
    ),
    "peers.service": (
        {"peers": {"service": "extproc", "port": 9002, "key_file": str(KEY_FILE)}},
        "kubernetes_asyncio",
        "kubernetes",
    ),
    "tracing.enabled": ({"tracing": {"enabled": True}}, "opentelemetry", "otel"),
    "adapters.store.redis": (
        {"adapters": {"store": {"redis": {"url": "redis://127.0.0.1:1"}}}},
        "redis",
        "redis",
    ),
}
"""By the field that needs an extra: a configuration, the package, the extra."""


@pytest.mark.parametrize("field", EXTRAS)
def test_an_extra_that_is_missing_is_named_with_the_field_and_the_command(
    field: str, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections, package, extra = EXTRAS[field]
    for name in (package, *(name for name in sys.modules if name.startswith(f"{package}."))):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "extproc.adapters.stores.redis", raising=False)
    check, serve = both(files, sections)

    assert (check.exit_code, serve.exit_code) == (2, 2)
    assert check.stderr == serve.stderr
    expected = (
        f"extproc: {field} needs the extra `{extra}`: in a checkout, pip install '.[{extra}]' ("
    )
    assert check.stderr.startswith(expected)
    assert len(check.stderr.splitlines()) == 1


def test_the_router_of_gateways_does_the_same_checks(files: Files) -> None:
    with pytest.raises(ConfigError, match=r"server\.tls\.cert_file: /nonexistent/tls\.crt: No su"):
        run(["--pool-name=pool", "--cert-path=/nonexistent"])
