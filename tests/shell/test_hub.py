"""Adapters of the Hugging Face Hub, with a fake of the one function that downloads."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from extproc.core.adapters.states import Failure, Result
from extproc.shell.hub import Hub

SOURCE = "hf:org/repo@v1"
FILES = ("adapter_config.json", "adapter_model.safetensors")


class FakeHub:
    """`snapshot_download` as huggingface_hub 2.4 has it: writes these files, then fails if told."""

    def __init__(self, *files: str, error: Exception | None = None) -> None:
        self.files = files
        self.error = error
        self.calls: list[dict[str, Any]] = []

    def download(self, **options: Any) -> str:
        self.calls.append(options)
        folder: Path = options["local_dir"]
        (folder / ".cache" / "huggingface").mkdir(parents=True)
        for name in self.files:
            (folder / name).write_text(name)
        if self.error is not None:
            raise self.error
        return str(folder)


def hub(folder: Path, fake: FakeHub, timeout_s: float = 60.0) -> Hub:
    return Hub("/adapters", folder, timeout_s=timeout_s, download=fake.download)


def there(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_pods_get_a_repository_or_the_folder_of_its_revision(tmp_path: Path) -> None:
    made = hub(tmp_path, FakeHub())

    assert made.path_of("hf:org/repo") == "org/repo"
    assert made.path_of(SOURCE) == "/adapters/org/repo@v1"
    assert made.path_of("hf:org/repo@refs/../x") == "/adapters/org/repo@refs%2F..%2Fx"
    assert made.path_of("/adapters/a@b") == "/adapters/a@b"


async def test_pods_download_by_themselves_what_has_no_revision(tmp_path: Path) -> None:
    fake = FakeHub()

    assert await hub(tmp_path, fake).fetch("hf:org/repo") == Result()
    assert await hub(tmp_path, fake).fetch("/adapters/a@b") == Result()
    assert fake.calls == []


async def test_a_revision_is_downloaded_once_and_stands_there_as_a_whole(tmp_path: Path) -> None:
    fake = FakeHub(*FILES)
    made = hub(tmp_path, fake)

    assert [await made.fetch(SOURCE) for _ in range(2)] == [Result(), Result()]
    assert there(tmp_path) == [f"org/repo@v1/{name}" for name in FILES]
    [call] = fake.calls
    assert (call["repo_id"], call["revision"]) == ("org/repo", "v1")
    assert (tmp_path / "org" / "repo@v1").stat().st_mode & 0o055, "pods are other users"


@pytest.mark.parametrize("files", [(), FILES[:1], FILES[1:]])
async def test_a_download_without_all_files_is_a_failure(
    tmp_path: Path, files: tuple[str, ...]
) -> None:
    """As huggingface_hub returns it without a network, from an earlier attempt."""
    made = hub(tmp_path, FakeHub(*files))

    result = await made.fetch(SOURCE)

    assert result.failure is Failure.FILES
    assert "the repository has no adapter_" in result.message
    assert there(tmp_path) == []


async def test_a_failed_download_leaves_nothing_and_is_tried_again(tmp_path: Path) -> None:
    fake = FakeHub(*FILES, error=OSError("404 Client Error:\n no such repository"))
    made = hub(tmp_path, fake)

    failed = await made.fetch(SOURCE)
    left = there(tmp_path)
    fake.error = None

    message = f"{SOURCE}: 404 Client Error: no such repository"
    assert (failed, left) == (Result(Failure.FILES, message), [])
    assert await made.fetch(SOURCE) == Result()


async def test_another_router_may_be_faster(tmp_path: Path) -> None:
    theirs, ours = hub(tmp_path, FakeHub(*FILES)), FakeHub(*FILES)
    download = ours.download

    def slowly(**options: Any) -> str:
        theirs._fetch("org/repo", "v1")
        return download(**options)

    ours.download = slowly  # type: ignore[method-assign]
    assert await hub(tmp_path, ours).fetch(SOURCE) == Result()
    assert there(tmp_path) == [f"org/repo@v1/{name}" for name in FILES]


async def test_a_long_download_goes_on_while_the_pod_is_told_to_wait(tmp_path: Path) -> None:
    is_free, fake = threading.Event(), FakeHub(*FILES)
    download = fake.download

    def slowly(**options: Any) -> str:
        is_free.wait()
        return download(**options)

    fake.download = slowly  # type: ignore[method-assign]
    made = hub(tmp_path, fake, timeout_s=0.05)
    waiting = await made.fetch(SOURCE)
    is_free.set()
    while (result := await made.fetch(SOURCE)).failure is Failure.TIMEOUT:
        pass

    assert waiting.failure is Failure.TIMEOUT
    assert result == Result()
    assert len(fake.calls) == 1


async def test_an_organisation_that_links_elsewhere_is_refused(tmp_path: Path) -> None:
    root, fake = tmp_path / "root", FakeHub(*FILES)
    root.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (root / "org").symlink_to("../elsewhere")

    assert "leads out of" in (await hub(root, fake).fetch(SOURCE)).message
    assert fake.calls == []


async def test_a_revision_needs_a_folder_and_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)

    assert "a folder for downloads" in (await Hub().fetch(SOURCE)).message
    result = await Hub("/adapters", tmp_path).fetch(SOURCE)
    assert result.failure is Failure.FILES
    assert "pip install 'lora-extproc[hub]'" in result.message


async def test_the_library_s_function_is_the_one_that_downloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library: Any = type(sys)("huggingface_hub")
    library.snapshot_download = FakeHub(*FILES).download
    monkeypatch.setitem(sys.modules, "huggingface_hub", library)

    assert await Hub("/adapters", tmp_path).fetch(SOURCE) == Result()
