"""The Helm chart, packaged by Helm's own library."""

from __future__ import annotations

import tarfile
from pathlib import Path

import helm_python

from release.place import ReleaseError

CHART = "charts/extproc"
"""Where the chart is, in a checkout."""


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


def files_of(package: Path) -> list[str]:
    """Return the names of the files in a packaged chart, without its own folder."""
    with tarfile.open(package) as archive:
        return sorted(name.partition("/")[2] for name in archive.getnames())
