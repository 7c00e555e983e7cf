"""The scripts that publish, before programs that write down how they were called."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from release.place import ROOT
from tests.commandline import run

DIGEST = "sha256:" + "ab" * 32
IMAGE, CHARTS = "registry.example/o/r", "registry.example/o/charts"


class Machine:
    """A folder of a release, and programs that do nothing but say what they would."""

    def __init__(self, folder: Path) -> None:
        self.dist, self._programs = folder / "dist", folder / "bin"
        self._calls, self._output = folder / "calls", folder / "output"
        self.dist.mkdir()
        self._programs.mkdir()
        for name in ("docker", "helm", "cosign", "gh"):
            self.program(name)

    def program(self, name: str, body: str = "") -> None:
        """Let a program also do this."""
        path = self._programs / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >> {shlex.quote(str(self._calls))}\n{body}\n')
        path.chmod(0o755)

    def has(self, *names: str) -> None:
        """Put files into the release."""
        for name in names:
            (self.dist / name).write_text(name)

    def run(self, script: str, *words: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": f"{self._programs}:{os.environ['PATH']}", "GITHUB_OUTPUT": str(self._output)}
        return run(ROOT / "scripts" / script, *words, env=env)

    @property
    def calls(self) -> list[str]:
        return self._calls.read_text().splitlines() if self._calls.exists() else []

    @property
    def output(self) -> str:
        return self._output.read_text() if self._output.exists() else ""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_images_of_all_architectures_become_one(machine: Machine) -> None:
    machine.program("docker", f'case "$*" in *inspect*) echo {DIGEST};; esac')
    machine.has("extproc-1.2.0-image-amd64.tar.gz", "extproc-1.2.0-image-arm64.tar.gz")
    machine.has("extproc-1.2.0-image-amd64.spdx.json", "extproc-1.2.0.tgz")

    done = machine.run("publish-image", IMAGE, str(machine.dist))

    assert done.returncode == 0, done.stderr
    pushed = [call.split()[-1] for call in machine.calls if call.startswith("docker push")]
    assert pushed == [f"{IMAGE}:1.2.0-amd64", f"{IMAGE}:1.2.0-arm64"]
    (created,) = [call for call in machine.calls if "imagetools create" in call]
    assert created.split()[-3:] == [f"{IMAGE}:1.2.0", *pushed]
    assert machine.output == f"digest={DIGEST}\n"


def test_a_release_without_images_is_not_pushed(machine: Machine) -> None:
    done = machine.run("publish-image", IMAGE, str(machine.dist))

    assert (done.returncode, done.stderr) == (1, f"{machine.dist} has no image\n")
    assert machine.calls == []


def test_an_image_without_a_digest_ends_the_release(machine: Machine) -> None:
    machine.has("extproc-1.2.0-image-amd64.tar.gz")

    assert machine.run("publish-image", IMAGE, str(machine.dist)).returncode == 1
    assert machine.output == ""


def test_the_chart_is_pushed_and_its_digest_kept(machine: Machine) -> None:
    machine.program("helm", f"echo Pushed: x >&2; echo Digest: {DIGEST} >&2")
    machine.has("extproc-1.2.0.tgz")

    done = machine.run("publish-chart", CHARTS, str(machine.dist))

    assert done.returncode == 0, done.stderr
    assert machine.calls == [f"helm push {machine.dist}/extproc-1.2.0.tgz oci://{CHARTS}"]
    assert machine.output == f"digest={DIGEST}\n"


@pytest.mark.parametrize("names", [[], ["extproc-1.1.0.tgz", "extproc-1.2.0.tgz"]])
def test_no_chart_is_pushed_where_there_is_not_one(machine: Machine, names: list[str]) -> None:
    machine.has(*names)
    done = machine.run("publish-chart", CHARTS, str(machine.dist))

    assert done.returncode == 1
    assert f"has {len(names)} charts" in done.stderr
    assert machine.calls == []


def test_a_chart_that_is_not_taken_ends_the_release(machine: Machine) -> None:
    machine.program("helm", "echo denied; exit 1")
    machine.has("extproc-1.2.0.tgz")

    done = machine.run("publish-chart", CHARTS, str(machine.dist))
    assert (done.returncode, done.stderr) == (1, "denied\n")


def test_image_chart_checksums_and_bills_are_signed(machine: Machine) -> None:
    machine.has("SHA256SUMS", "extproc-1-image-amd64.spdx.json", "extproc-1-image-arm64.spdx.json")
    image, chart, folder = f"{IMAGE}@{DIGEST}", f"{CHARTS}/extproc@{DIGEST}", str(machine.dist)

    assert machine.run("sign-release", image, chart, folder).returncode == 0
    attest = "cosign attest --yes --type spdxjson --predicate"
    assert machine.calls == [
        f"cosign sign --yes --recursive {image}",
        f"cosign sign --yes {chart}",
        f"{attest} {folder}/extproc-1-image-amd64.spdx.json {image}",
        f"{attest} {folder}/extproc-1-image-arm64.spdx.json {image}",
        f"cosign sign-blob --yes --bundle {folder}/SHA256SUMS.sigstore.json {folder}/SHA256SUMS",
    ]


def test_only_digests_are_signed(machine: Machine) -> None:
    """A tag can be another image by the time it is signed."""
    done = machine.run("sign-release", f"{IMAGE}:1.2.0", f"{CHARTS}@{DIGEST}", str(machine.dist))

    assert done.returncode == 1
    assert "not named by its digest" in done.stderr
    assert machine.calls == []


def test_the_page_has_the_notes_and_all_files(machine: Machine) -> None:
    machine.has("NOTES.md", "SHA256SUMS", "extproc-1.2.0.tgz")

    assert machine.run("publish-page", "v1.2.0", str(machine.dist)).returncode == 0
    (call,) = machine.calls
    assert call == (
        f"gh release create v1.2.0 --verify-tag --title 1.2.0 --notes-file {machine.dist}/NOTES.md "
        f"{machine.dist}/SHA256SUMS {machine.dist}/extproc-1.2.0.tgz"
    )


def test_only_wheel_and_sdist_go_to_the_index(machine: Machine, tmp_path: Path) -> None:
    machine.has("lora_extproc-1.2.0-py3-none-any.whl", "lora_extproc-1.2.0.tar.gz")
    machine.has("lora_extproc-1.2.0-py3-none-any.whl.spdx.json", "extproc-1.2.0.tgz", "NOTES.md")
    target = tmp_path / "index"

    assert machine.run("only-python", str(machine.dist), str(target)).returncode == 0
    assert sorted(path.name for path in target.iterdir()) == [
        "lora_extproc-1.2.0-py3-none-any.whl",
        "lora_extproc-1.2.0.tar.gz",
    ]


@pytest.mark.parametrize(
    "script", ["publish-image", "publish-chart", "sign-release", "publish-page", "only-python"]
)
def test_a_script_without_its_arguments_says_what_it_needs(machine: Machine, script: str) -> None:
    done = machine.run(script)

    assert done.returncode != 0
    assert "the" in done.stderr
    assert machine.calls == []
