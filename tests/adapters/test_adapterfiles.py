"""Adapters' files as this process sees them: what stands in the way, and changes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from extproc.adapters.adapterfiles import MAX_CONFIG_BYTES, AdapterFiles, Root, locate
from extproc.adapters.adapterstates import Failure, Result
from tests.waiting import beside, eventually

CONFIG = {"peft_type": "LORA", "r": 8, "bias": "none", "base_model_name_or_path": "base"}


def write(folder: Path, **changes: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The root, as the router sees it; pods see it at /adapters."""
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@asynccontextmanager
async def following(
    *roots: Root, paths: Iterable[str] = (), timeout_s: float = 30.0
) -> AsyncIterator[tuple[AdapterFiles, list[str]]]:
    """Files that are followed, and the paths of those that changed."""
    changed: list[str] = []
    files = AdapterFiles(roots, on_change=changed.append, interval_s=0.01, timeout_s=timeout_s)
    files.follow(paths)
    async with beside(files.run()):
        yield files, changed


async def check(
    folder: Path, path: str = "/adapters/a", *, max_rank: int | None = 16
) -> Result | None:
    files = AdapterFiles([Root("/adapters", folder)], on_change=lambda _: None)
    return await files.check(path, max_rank=max_rank)


async def problem(folder: Path) -> Result:
    found = await check(folder)
    assert found is not None
    return found


async def is_seen_and_good(folder: Path) -> bool:
    """Whether there is no problem, but for pods that take no adapter of its rank."""
    low = await check(folder, max_rank=1)
    return await check(folder) is None and low is not None and "its rank is 8" in low.message


# --- where they are -------------------------------------------------------------------------------


def test_the_first_root_that_holds_a_path_counts() -> None:
    roots = [Root("/adapters/team", Path("/team")), Root("/adapters", Path("/mnt"))]

    assert locate("/adapters/team/a", roots) == (roots[0], Path("/team/a"))
    assert locate("/adapters//a/", roots) == (roots[1], Path("/mnt/a"))
    assert locate("/adapters", roots) == (roots[1], Path("/mnt"))
    assert locate("/a", [Root("/", Path("/"))]) == (Root("/", Path("/")), Path("/a"))
    assert locate("/adapters2/a", roots) is locate("org/repo", roots) is None


async def test_the_innermost_root_counts(folder: Path) -> None:
    inner = write(folder.parent / "inner" / "a", r=4).parent
    roots = [Root("/adapters", folder), Root("/adapters/team", inner)]
    files = AdapterFiles(roots, on_change=lambda _: None)

    found = await files.check("/adapters/team/a", max_rank=1)
    assert found is not None
    assert "its rank is 4" in found.message


@pytest.fixture
def guarded() -> Iterator[list[Path]]:
    """A root with an adapter whose configuration nobody may read, and one that nobody may enter."""
    with tempfile.TemporaryDirectory() as made:
        roots = [Path(made) / "unread", Path(made) / "closed"]
        for root in roots:
            write(root / "a")
        for path in (Path(made), roots[0], roots[0] / "a"):
            path.chmod(0o755)
        for path in (roots[0] / "a" / "adapter_config.json", roots[1]):
            path.chmod(0)
        yield roots
        roots[1].chmod(0o755)


async def test_what_this_process_may_not_read_is_not_judged(
    guarded: list[Path], unreadable: Path
) -> None:
    """Pods may, as another user. `unreadable` makes us nobody where we are root."""
    assert [await check(root, max_rank=1) for root in guarded] == [None, None]


async def test_what_is_not_here_is_not_judged(folder: Path) -> None:
    assert await check(folder, "org/repo") is None
    assert await check(folder / "not mounted") is None
    assert await check(folder, "/adapters/a\0") is None


# --- what stands in the way -----------------------------------------------------------------------


async def test_a_good_adapter_has_no_problem(folder: Path) -> None:
    write(folder / "a")

    assert await is_seen_and_good(folder)


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt"])
async def test_weights_may_have_another_format(folder: Path, name: str) -> None:
    (write(folder / "a") / "adapter_model.safetensors").rename(folder / "a" / name)

    assert await is_seen_and_good(folder)


async def test_files_that_are_missing_or_torn_are_named(folder: Path) -> None:
    """vLLM 18372: loading such a path once answered 200."""
    assert await problem(folder) == Result(Failure.FILES, "there is no adapter_config.json")
    config = write(folder / "a") / "adapter_config.json"
    weights = folder / "a" / "adapter_model.safetensors"
    weights.unlink()
    assert await problem(folder) == Result(Failure.FILES, "adapter_model.safetensors: missing")
    weights.touch()
    assert "adapter_model.safetensors: empty" in (await problem(folder)).message
    config.write_text("{")
    assert "adapter_config.json: not an adapter's" in (await problem(folder)).message
    config.write_bytes(b" " * (MAX_CONFIG_BYTES + 1))
    assert "adapter_config.json: larger than" in (await problem(folder)).message
    config.unlink()
    os.mkfifo(config)
    assert "adapter_config.json: not a regular file" in (await problem(folder)).message


async def test_an_adapter_that_pods_cannot_serve_is_named_with_all_reasons(folder: Path) -> None:
    write(folder / "a", r=64, use_dora=True)

    assert await check(folder) == Result(
        Failure.REFUSED,
        "its rank is 64, and the pods' max_lora_rank 16; it is a DoRA adapter (use_dora)",
    )


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
async def test_links_out_of_the_root_are_refused(folder: Path, name: str) -> None:
    outside, inside = write(folder.parent / "outside"), write(folder / "a")
    (inside / name).unlink()
    (inside / name).symlink_to(outside / name)

    assert await problem(folder) == Result(Failure.FILES, f"{name}: leads out of {folder}")


async def test_a_folder_that_leads_out_of_the_root_is_refused(folder: Path) -> None:
    write(folder.parent / "outside")
    (folder / "a").symlink_to("../outside")
    dots = await check(folder, "/adapters/../outside")

    assert "leads out" in (await problem(folder)).message
    assert dots is not None
    assert "leads out" in dots.message


async def test_links_within_the_root_are_followed(folder: Path) -> None:
    """As the cache of the Hugging Face Hub has them, and ConfigMaps."""
    write(folder / "blobs")
    (folder / "v1").mkdir()
    for file in (folder / "blobs").iterdir():
        (folder / "v1" / file.name).symlink_to(Path("..") / "blobs" / file.name)
    (folder / "a").symlink_to("v1")

    assert await is_seen_and_good(folder)


# --- changes --------------------------------------------------------------------------------------


async def test_files_that_appear_change_or_go_are_reported(folder: Path) -> None:
    paths = ["/adapters/a", "/adapters/b", "/elsewhere/c"]
    async with following(Root("/adapters", folder), paths=paths) as (files, changed):
        assert await files.check("/adapters/a") is not None
        write(folder / "a")
        await eventually(lambda: bool(changed))
        changed.clear()
        (folder / "a" / "adapter_model.safetensors").write_bytes(b"other weights")
        await eventually(lambda: bool(changed))
        changed.clear()
        shutil.rmtree(folder / "a")
        await eventually(lambda: bool(changed))

    assert set(changed) == {"/adapters/a"}


async def test_a_change_between_the_check_and_the_next_look_is_not_lost(folder: Path) -> None:
    write(folder / "a", r=64)
    changed: list[str] = []
    files = AdapterFiles([Root("/adapters", folder)], on_change=changed.append)
    files.follow(["/adapters/a"])
    assert await files.check("/adapters/a", max_rank=8) is not None
    write(folder / "a", r=8)

    async with beside(files.run()):
        await eventually(lambda: changed == ["/adapters/a"])


async def test_the_swapped_link_of_a_configmap_is_a_change(folder: Path) -> None:
    write(folder / "..1")
    write(folder / "..2")
    (folder / "..data").symlink_to("..1")
    (folder / "a").mkdir()
    for file in (folder / "..1").iterdir():
        (folder / "a" / file.name).symlink_to(Path("..") / "..data" / file.name)
    async with following(Root("/adapters", folder), paths=["/adapters/a"]) as (files, changed):
        assert await files.check("/adapters/a") is None
        (folder / "..new").symlink_to("..2")
        (folder / "..new").rename(folder / "..data")
        await eventually(lambda: changed == ["/adapters/a"])


async def test_adapters_that_are_no_longer_followed_are_not_reported(folder: Path) -> None:
    write(folder / "a")
    write(folder / "b")
    paths = ["/adapters/a", "/adapters/b"]
    async with following(Root("/adapters", folder), paths=paths) as (files, changed):
        await files.check("/adapters/b")
        files.follow(["/adapters/b"])
        write(folder / "a", r=1)
        write(folder / "b", r=1)
        await eventually(lambda: bool(changed))

    assert set(changed) == {"/adapters/b"}


async def test_a_mount_that_hangs_holds_up_no_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hung, is_back, stat = folder.parent / "hung", threading.Event(), os.stat
    hung.mkdir()

    def hanging(path: str, **options: Any) -> os.stat_result:
        if str(path).startswith(str(hung)):
            is_back.wait()
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", hanging)
    roots, paths = (Root("/hung", hung), Root("/adapters", folder)), ["/hung/a", "/adapters/a"]
    async with following(*roots, paths=paths, timeout_s=0.2) as (files, changed):
        assert await files.check("/hung/a") is None
        assert await files.check("/adapters/a") is not None
        write(folder / "a")
        await eventually(lambda: changed == ["/adapters/a"] and bool(caplog.messages))
        is_back.set()
        while await files.check("/hung/a") is None:
            await asyncio.sleep(0.01)
        write(hung / "a")
        await eventually(lambda: "/hung/a" in changed)

    assert caplog.messages == [f"{hung} does not answer: its adapters are not checked"]
