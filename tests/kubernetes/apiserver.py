"""A real kube-apiserver over a real etcd, both on loopback and in their own folder.

The programs are those of controller-runtime's envtest: looked for in the folder that
KUBEBUILDER_ASSETS names, then on PATH. There is no kubelet, no scheduler and no controller: tests
write what those would, a Pod's `spec.nodeName` and `status` among it.

Everything here blocks; tests that run something beside it in the event loop call it by
`asyncio.to_thread` (`launch` aside).
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self

import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from extproc.files.tls import client_context
from extproc.stack.processes import ChildProcess, free_port
from tests.commandline import run

READY_S = 180.0
"""Two seconds on an idle machine."""
PROGRAMS = ("etcd", "kube-apiserver", "kubectl")

_AUDIT_POLICY = """
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: Metadata, userGroups: ["system:serviceaccounts"]}
- {level: None}
"""


def find_program(name: str) -> str | None:
    """Return the path of etcd, kube-apiserver, kubectl or egctl; None where there is none."""
    assets = os.environ.get("KUBEBUILDER_ASSETS", "")
    return (assets and shutil.which(name, path=assets)) or shutil.which(name)


def missing_programs(*names: str) -> str:
    """Return why a test that needs these cannot run; empty where it can."""
    missing = [name for name in names if find_program(name) is None]
    if not missing:
        return ""
    return f"no {', '.join(missing)} in KUBEBUILDER_ASSETS or on PATH (setup-envtest use 1.34)"


def find_crds() -> Path | None:
    """Return the folder of resource definitions: EXTPROC_CRDS, else `crds` by the programs."""
    named = os.environ.get("EXTPROC_CRDS", "")
    beside = Path(os.environ.get("KUBEBUILDER_ASSETS") or os.devnull) / "crds"
    found = Path(named) if named else beside
    return found if found.is_dir() else None


class ApiServer:
    """One kube-apiserver with RBAC, an administrator and a kubectl.

    Attributes:
        url: `https://127.0.0.1:PORT`.
        admin_token: Bearer token of a member of system:masters.
        kubeconfig: File that makes its reader that administrator.
    """

    def __init__(self) -> None:
        self.dir = Path(tempfile.mkdtemp(prefix="extproc-kubernetes-"))
        self.admin_token = secrets.token_hex(16)
        self.kubeconfig = self.dir / "kubeconfig"
        self._port = free_port()
        self._etcd_url = f"http://127.0.0.1:{free_port()}"
        self._programs = {name: ChildProcess(name) for name in ("etcd", "kube-apiserver")}

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._port}"

    @property
    def port(self) -> int:
        return self._port

    @property
    def ca_file(self) -> Path:
        """PEM file that the server's certificate is checked with."""
        return self.dir / "certificates" / "apiserver.crt"

    # --- life --------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            self._prepare()
            self._start_etcd()
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End both programs and remove what they wrote."""
        for program in self._programs.values():
            _kill(program)
            shutil.rmtree(program.dir, ignore_errors=True)
        shutil.rmtree(self.dir, ignore_errors=True)

    def start(self) -> None:
        """Start the API server (again, on the same port) and wait until it is ready."""
        self.launch()
        self.wait_until_ready()

    def launch(self) -> None:
        """Start without waiting. From the main thread: the server dies with the thread."""
        keys = self.dir / "service-accounts.key"
        self._spawn(
            "kube-apiserver",
            f"--etcd-servers={self._etcd_url}",
            f"--secure-port={self._port}",
            "--bind-address=127.0.0.1",
            "--advertise-address=192.0.2.1",  # nobody asks there; without a route it finds none
            f"--cert-dir={self.dir}/certificates",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={keys}",
            f"--service-account-signing-key-file={keys}",
            f"--token-auth-file={self.dir}/tokens.csv",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--disable-admission-plugins=ServiceAccount",
            "--allow-privileged",
            f"--audit-policy-file={self.dir}/audit-policy.yaml",
            f"--audit-log-path={self.dir}/audit.log",
        )

    def wait_until_ready(self) -> None:
        """Wait until the API server is ready.

        Raises:
            AssertionError: With the end of its log.
        """
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if not self._programs["kube-apiserver"].is_running:
                break
            if self._is_ready():
                return
            time.sleep(0.1)
        raise AssertionError(f"kube-apiserver is not ready: {self.log('kube-apiserver')}")

    def stop(self) -> None:
        """Kill the API server; etcd stays, and with it all objects."""
        _kill(self._programs["kube-apiserver"])

    def log(self, program: str) -> str:
        """The end of what a program wrote."""
        return self._programs[program].log[-2000:]

    # --- use ---------------------------------------------------------------------------------

    def kubectl(self, *arguments: str, input: str | None = None) -> str:
        """Run kubectl as the administrator and return its output.

        Raises:
            AssertionError: It failed; with its message.
        """
        done = self._kubectl(*arguments, input=input)
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def define(self, crds: Path) -> None:
        """Apply the custom resource definitions of a folder, and wait until they are served."""
        self.kubectl("apply", "--server-side", "-f", str(crds))
        self.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=90s")

    def token(self, namespace: str, serviceaccount: str) -> str:
        """A bearer token of a service account, good for an hour."""
        return self.kubectl("create", "token", serviceaccount, "-n", namespace).strip()

    def account(self, namespace: str, name: str, *grants: str) -> str:
        """Create a service account, and return a token of it.

        Args:
            namespace: Where it is.
            name: What it is called.
            grants: Resources that it may list and watch, each as arguments of `create role`.
        """
        where = ("-n", namespace)
        self.kubectl("create", "serviceaccount", name, *where)
        for number, grant in enumerate(grants):
            role = f"{name}-{number}"
            self.kubectl("create", "role", role, "--verb=list,watch", *grant.split(), *where)
            bound = (f"--role={role}", f"--serviceaccount={namespace}:{name}")
            self.kubectl("create", "rolebinding", role, *bound, *where)
        return self.token(namespace, name)

    def kubeconfig_for(self, token: str, *, url: str = "", namespace: str = "default") -> Path:
        """Write a kubeconfig for a token, for this server or for a proxy before it."""
        path = self.dir / f"kubeconfig-{secrets.token_hex(4)}"
        self._write_kubeconfig(path, token, url or self.url, namespace)
        return path

    def requests_of(self, namespace: str, serviceaccount: str) -> list[dict[str, Any]]:
        """Return the requests of a service account so far, as audit events."""
        user = f"system:serviceaccount:{namespace}:{serviceaccount}"
        path = self.dir / "audit.log"
        lines = path.read_text().splitlines() if path.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in events if event["user"]["username"] == user]

    # --- parts -------------------------------------------------------------------------------

    def _is_ready(self) -> bool:
        """Not by kubectl: ten of those in a second would leave nothing for the server."""
        try:
            request = urllib.request.Request(
                f"{self.url}/readyz", headers={"Authorization": f"Bearer {self.admin_token}"}
            )
            context = client_context(self.ca_file)
            with urllib.request.urlopen(request, timeout=10, context=context) as answer:
                return bool(answer.status == HTTPStatus.OK)
        except (OSError, ValueError):  # the file is not there, or not complete
            return False

    def _prepare(self) -> None:
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        pem = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
        (self.dir / "service-accounts.key").write_bytes(pem)
        (self.dir / "tokens.csv").write_text(f"{self.admin_token},admin,admin,system:masters\n")
        (self.dir / "audit-policy.yaml").write_text(_AUDIT_POLICY)
        self._write_kubeconfig(self.kubeconfig, self.admin_token, self.url, "default")

    def _write_kubeconfig(self, path: Path, token: str, url: str, namespace: str) -> None:
        cluster: dict[str, object] = {"server": url}
        if url.startswith("https:"):
            cluster["certificate-authority"] = str(self.ca_file)
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "it", "cluster": cluster}],
            "users": [{"name": "it", "user": {"token": token}}],
            "contexts": [
                {"name": "it", "context": {"cluster": "it", "user": "it", "namespace": namespace}}
            ],
            "current-context": "it",
        }
        path.write_text(yaml.safe_dump(config))

    def _start_etcd(self) -> None:
        peers = f"http://127.0.0.1:{free_port()}"
        self._spawn(
            "etcd",
            f"--data-dir={self.dir}/etcd",
            "--unsafe-no-fsync",
            f"--listen-client-urls={self._etcd_url}",
            f"--advertise-client-urls={self._etcd_url}",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=default={peers}",
        )

    def _spawn(self, program: str, *arguments: str) -> None:
        path = find_program(program)
        assert path is not None, missing_programs(program)
        self._programs[program].spawn([path, *arguments], cwd=self.dir)

    def _kubectl(
        self, *arguments: str, input: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        path = find_program("kubectl")
        assert path is not None, missing_programs("kubectl")
        own = (f"--kubeconfig={self.kubeconfig}", f"--cache-dir={self.dir}/kubectl-cache")
        return run(path, *own, *arguments, input=input)


def _kill(program: ChildProcess) -> None:
    program.send(signal.SIGKILL)
    while program.is_running:
        time.sleep(0.01)
