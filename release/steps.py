"""The steps of a release, in their order. Each leaves its files in the release's folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import helm_python

from release import image, notes, sbom
from release.packages import Package, from_metadata, licence_problems
from release.place import Place, ReleaseError, run, sha256_of
from release.table import CHECKSUMS, Record, write_checksums

_OURS = ("extproc-*", "lora_extproc-*", "NOTES.md", CHECKSUMS)
_IN_WHEEL = ("extproc/data/envoy/", "extproc/data/loadtest/", ".dist-info/licenses/LICENSE")
_IN_SDIST = ("docker-compose.yml", "Dockerfile", "CHANGELOG.md", "manifests/", "docs/", "tests/")
CHART = "charts/extproc"
"""Where the chart is, in a checkout."""
_AUDITED_WITHIN_S = 300.0


def do_notes(place: Place, record: Record) -> None:
    """The notes of this version, from CHANGELOG.md."""
    path = place.out / "NOTES.md"
    path.write_text(notes.draft(place) + "\n", encoding="utf-8")
    record.files.append(path)
    record.said.append(f"version {place.version}, commit {place.commit()[:12]}")


def do_wheel(place: Place, record: Record) -> None:
    """Wheel and sdist, with what belongs into them."""
    env = {**os.environ, "SOURCE_DATE_EPOCH": str(place.committed_wall_s())}
    run(sys.executable, "-m", "build", "--outdir", str(place.out), str(place.root), env=env)
    wheel, sdist = place.made("*.whl"), place.made("*[0-9].tar.gz")
    if f"-{place.version}-" not in wheel.name or not sdist.name.endswith(
        f"-{place.version}.tar.gz"
    ):
        raise ReleaseError(f"{wheel.name} and {sdist.name} are not of version {place.version}")
    with zipfile.ZipFile(wheel) as archive:
        _need(wheel, archive.namelist(), _IN_WHEEL)
    with tarfile.open(sdist) as files:
        _need(sdist, files.getnames(), _IN_SDIST)
    record.files += [wheel, sdist]


def do_try(place: Place, record: Record) -> None:
    """`extproc demo` of the wheel in an empty environment, and the wheel's bill of materials."""
    with tempfile.TemporaryDirectory(prefix="extproc-release-") as folder:
        programs = _install(place, Path(folder) / "venv")
        _demonstrate(programs, place.version)
        parts = [each for each in _installed(programs) if each.name != "lora-extproc"]
    record.said.append("`extproc demo` of the wheel alone works")
    wheel = place.made("*.whl")
    path = wheel.with_name(f"{wheel.name}.spdx.json")
    _write_sbom(place, "lora-extproc", sha256_of(wheel), parts, path)
    record.files.append(path)
    record.said.append(f"{len(parts)} packages with the extra `demo`")


def _install(place: Place, folder: Path) -> Path:
    """Install the wheel with what `extproc demo` needs; return the environment's `bin`.

    Raises:
        ReleaseError: There is no wheel, or it cannot be installed.
    """
    run(sys.executable, "-m", "venv", str(folder))
    python = folder / "bin" / "python"
    wheel = place.made("*.whl")
    pins = str(place.root / "constraints.txt")
    pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "--constraint", pins, f"{wheel}[demo]", cwd=folder)
    return folder / "bin"


def _installed(bin_folder: Path) -> list[Package]:
    """Return the Python packages of an environment."""
    found = bin_folder.parent.glob("lib/*/site-packages/*.dist-info/METADATA")
    return [from_metadata(path.read_text(encoding="utf-8")) for path in sorted(found)]


def _demonstrate(bin_folder: Path, version: str) -> None:
    """Run `extproc demo`: Envoy, fake pods, three policies, and an adapter that is registered.

    Raises:
        ReleaseError: It says another version, a request failed, or anything else did.
    """
    # Nothing of the checkout: neither its folder nor what the environment says of Python.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env["PATH"] = f"{bin_folder}{os.pathsep}{env.get('PATH', '')}"
    program = str(bin_folder / "extproc")
    said = run(program, "--version", cwd=bin_folder.parent, env=env)
    if version not in said.split():
        raise ReleaseError(f"`extproc --version` says {said!r} and not {version}")
    run(program, "demo", "--seconds", "2", cwd=bin_folder.parent, env=env)


def do_audit(place: Place, record: Record) -> None:
    """Known vulnerabilities of what the image installs (constraints.txt), by pip-audit."""
    pins = str(place.root / "constraints.txt")
    command = [sys.executable, "-m", "pip_audit", "--requirement", pins, "--no-deps"]
    command += ["--disable-pip", "--format", "json", "--progress-spinner", "off", "--timeout", "20"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_AUDITED_WITHIN_S)
        dependencies = json.loads(done.stdout)["dependencies"]
    except (subprocess.TimeoutExpired, ValueError, KeyError):
        dependencies = []
    record.said.append(judge(dependencies, is_required=place.audit == "required"))


def judge(dependencies: list[dict[str, Any]], *, is_required: bool) -> str:
    """Return in words what pip-audit says of packages; none at all is no answer.

    Raises:
        ReleaseError: One of them has a known vulnerability, or `is_required` and not all were
            looked up.
    """
    known = [
        f"{each['name']} {each['version']}: {vulnerability['id']}"
        for each in dependencies
        for vulnerability in each.get("vulns", ())
    ]
    if known:
        raise ReleaseError("known vulnerabilities:\n" + "\n".join(known))
    # pip-audit skips, and does not fail, where the database does not answer.
    looked_up = [each for each in dependencies if "skip_reason" not in each]
    if looked_up and len(looked_up) == len(dependencies):
        return f"{len(dependencies)} packages, no known vulnerability"
    if is_required:
        raise ReleaseError("the database of vulnerabilities does not answer for all packages")
    return f"NOT DONE: the database answers for {len(looked_up)} of {len(dependencies)} packages"


def do_image(place: Place, record: Record) -> None:
    """The image, its bill of materials, and a look at its files and licences."""
    found_id = image.build(place)
    path = image.save(place)
    found = image.read(place)
    kinds = Counter(each.kind for each in found.packages)
    if not kinds["pypi"] or not kinds["deb"]:
        raise ReleaseError(f"the image's packages cannot be read: {dict(kinds)}")
    if problems := found.problems + licence_problems(found.packages):
        raise ReleaseError("the image has what it must not have:\n" + "\n".join(problems[:50]))
    bill = place.out / f"extproc-{place.version}-image-{place.architecture}.spdx.json"
    parts = [each for each in found.packages if each.name != "lora-extproc"]
    _write_sbom(place, "extproc-image", found_id.removeprefix("sha256:"), parts, bill)
    record.files += [path, bill]
    record.said += [
        f"{place.tagged} for {place.architecture}, {found.num_bytes / 1e6:.0f} MB unpacked",
        f"{found.num_files:,} files: no setuid, none that anyone may write, no credentials",
        f"{kinds['pypi']} Python packages without copyleft beyond the LGPL's",
        f"{kinds['deb']} packages of Debian",
    ]


def do_chart(place: Place, record: Record) -> None:
    """The Helm chart, packaged by Helm's own library."""
    record.files.append(package_chart(place.root / CHART, place.out, place.version))


def package_chart(folder: Path, out: Path, version: str) -> Path:
    """Package a chart as this version, of this version of the program.

    Raises:
        ReleaseError: There is no chart, Helm does not take it, or it refers to what is missing.
    """
    if not (folder / "Chart.yaml").is_file():
        raise ReleaseError(f"{folder} has no Chart.yaml")
    out.mkdir(parents=True, exist_ok=True)
    try:
        made = helm_python.package(
            str(folder), destination=str(out), version=version, app_version=version
        )
    except helm_python.HelmError as error:
        raise ReleaseError(f"Helm does not package {folder.name}: {error}") from error
    return Path(made)


def do_sums(place: Place, record: Record) -> None:
    """The checksums of all files, which are what is signed."""
    record.files.append(write_checksums(place.out))


Step = Callable[[Place, Record], None]
STEPS: Mapping[str, Step] = MappingProxyType(
    {
        "notes": do_notes,
        "wheel": do_wheel,
        "try": do_try,
        "audit": do_audit,
        "image": do_image,
        "chart": do_chart,
        "sums": do_sums,
    }
)


def perform(place: Place, names: Sequence[str], say: Callable[[str], None]) -> list[Record]:
    """Do steps by name in this order; return what each did.

    Raises:
        ReleaseError: One failed; the later ones are not tried.
    """
    place.out.mkdir(parents=True, exist_ok=True)
    records = []
    for name in names:
        say(f"== {name}")
        record = Record(name)
        start_s = time.monotonic()
        STEPS[name](place, record)
        record.took_s = time.monotonic() - start_s
        records.append(record)
    return records


def clear(place: Place) -> None:
    """Remove what an earlier release has left, and nothing else."""
    for pattern in _OURS:
        for path in place.out.glob(pattern):
            path.unlink()


def _need(archive: Path, names: Sequence[str], wanted: Sequence[str]) -> None:
    missing = [each for each in wanted if not any(each in name for name in names)]
    if missing:
        raise ReleaseError(f"{archive.name} lacks {', '.join(missing)}")


def _write_sbom(place: Place, name: str, sha256: str, parts: Sequence[Package], path: Path) -> None:
    subject = sbom.Subject(name, place.version, sha256, place.committed_wall_s())
    sbom.write_sbom(subject, parts, path)
