"""Adapters of the Hugging Face Hub, `hf:ORG/REPO[@REVISION]`.

Without a revision a pod downloads the adapter itself: vLLM and SGLang take ORG/REPO for a path. No
engine takes a revision, so these are downloaded here, once, into a folder that pods see too.

A token and a mirror are what huggingface_hub knows them by: HF_TOKEN, HF_ENDPOINT.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from extproc.core.adapters.states import Failure, Result
from extproc.core.errors import needs_extra
from extproc.shell.aside import Aside
from extproc.shell.files import FileError, describe_failure

DOWNLOAD_TIMEOUT_S: Final = 600.0
_SCHEME = "hf:"
_MAX_REASON_CHARS = 500
_PATTERNS = ["adapter_config.json", "adapter_model.*"]

Download = Callable[..., Any]
"""As `huggingface_hub.snapshot_download`."""


class Hub:
    """Downloads adapters, one at a time. Belongs to one event loop.

    Args:
        pod: The folder for downloads, as pods see it; "" for none.
        router: The same folder, as this process sees it.
        timeout_s: Longest wait for a download, which then goes on.
    """

    def __init__(
        self,
        pod: str = "",
        router: Path = Path(),
        *,
        timeout_s: float = DOWNLOAD_TIMEOUT_S,
        download: Download | None = None,
    ) -> None:
        self._pod = pod.rstrip("/")
        self._router = router
        self._download = download
        self._aside = Aside(timeout_s)

    def path_of(self, source: str) -> str:
        """Return what a pod is told to load for a source: a folder, or a repository of the Hub."""
        repository, revision = _parse(source)
        if not revision:
            return repository
        return f"{self._pod}/{_folder(repository, revision)}"

    async def fetch(self, source: str) -> Result:
        """Have the files of a source in `path_of`, unless pods fetch them themselves."""
        repository, revision = _parse(source)
        if not revision:
            return Result()
        if not self._pod:
            return Result(Failure.FILES, f"{source}: a revision needs a folder for downloads")
        try:
            await self._aside.call(lambda: self._fetch(repository, revision))
        except TimeoutError:
            return Result(Failure.TIMEOUT, f"{source}: the download takes long, and goes on")
        except Exception as error:  # of any kind: the library has a dozen
            line = " ".join(describe_failure(error).split()) or type(error).__name__
            return Result(Failure.FILES, f"{source}: {line[:_MAX_REASON_CHARS]}")
        return Result()

    def _fetch(self, repository: str, revision: str) -> None:
        final = self._router / _folder(repository, revision)
        if final.is_dir():
            return
        final.parent.mkdir(parents=True, exist_ok=True)
        if not final.parent.resolve().is_relative_to(self._router.resolve()):
            raise FileError(final.parent, f"leads out of {self._router}")
        download = self._download or _library()
        with tempfile.TemporaryDirectory(prefix=".part-", dir=final.parent) as part:
            files = Path(part) / "files"
            download(
                repo_id=repository, revision=revision, local_dir=files, allow_patterns=_PATTERNS
            )
            # Without the network the library may return what is there, which may be nothing.
            for pattern in _PATTERNS:
                if not any(files.glob(pattern)):
                    raise FileError(files, f"the repository has no {pattern}")
            shutil.rmtree(files / ".cache", ignore_errors=True)  # what the library keeps
            try:
                os.rename(files, final)
            except OSError:
                if not final.is_dir():  # else another router was faster
                    raise


def _parse(source: str) -> tuple[str, str]:
    """Return repository and revision; a source of another kind as it is."""
    if not source.startswith(_SCHEME):
        return source, ""
    repository, _, revision = source.removeprefix(_SCHEME).partition("@")
    return repository, revision


def _folder(repository: str, revision: str) -> str:
    """Return the folder of a revision, under that for downloads. Revisions may have slashes."""
    return f"{repository}@{quote(revision, safe='')}"


def _library() -> Download:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # they would be in our log
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ImportError(needs_extra("a revision (hf:ORG/REPO@REVISION)", "hub", error)) from error
    return snapshot_download  # type: ignore[no-any-return]
