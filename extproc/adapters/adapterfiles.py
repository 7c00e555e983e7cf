"""The files of adapters, where this process sees them: whether pods could serve them, and changes.

Pods read the files themselves, under their own paths; a `Root` says where the same folder is here.
Files that cannot be seen are not judged: the pods' answer decides. Symbolic links are resolved
here, so those of a root must lead to the same files in the pods: relative ones do.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from extproc.adapters.adapterstates import Failure, Result
from extproc.files.blocking import BlockingCalls
from extproc.files.reading import FileError, UnreadableError, read_bytes
from extproc.phrases import MAX_NAMED, short

# --- what an adapter's `adapter_config.json` says, and why pods would refuse the adapter.
#
# PEFT writes the file. The rules are vLLM's (`lora/peft_helper.py`, 0.32); those that only some
# versions have are left to the engine.

_SAVED = ("classifier", "score")
"""Modules that vLLM can replace whole: the heads of classification models."""


class AdapterConfigError(ValueError):
    """A file that is no configuration of an adapter; the message says why."""


class AdapterConfigFile(Struct, frozen=True):
    """The fields of the file that decide whether pods can serve the adapter.

    Attributes:
        r: The rank; `rank_pattern` has further ones for some modules.
    """

    r: int | None = None
    peft_type: str | None = None
    bias: str | None = None
    use_dora: bool | None = None
    modules_to_save: list[str] | None = None
    rank_pattern: dict[str, int] | None = None

    @property
    def rank(self) -> int | None:
        """The largest rank, for which a pod needs room; None where there is none."""
        return max((self.r, *(self.rank_pattern or {}).values())) if self.r is not None else None


_decoder = msgspec.json.Decoder(AdapterConfigFile)


def decode_config(content: bytes) -> AdapterConfigFile:
    """Decode the file.

    Raises:
        AdapterConfigError: It is not JSON, or a field has another type.
    """
    try:
        return _decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AdapterConfigError(f"not an adapter's configuration: {error}") from None


def obstacles(config: AdapterConfigFile, *, max_rank: int | None = None) -> list[str]:
    """Return why pods would refuse the adapter, in plain words; none if they should take it.

    Args:
        max_rank: The pods' `--max-lora-rank`; None where unknown.
    """
    found = [*_kind(config), *_ranks(config, max_rank)]
    if config.bias not in (None, "none"):
        found.append(f"bias is {short(config.bias)}, and only none can be served")
    if config.use_dora:
        found.append("it is a DoRA adapter (use_dora)")
    saved = [name for name in config.modules_to_save or () if name not in _SAVED]
    if saved:
        names = ", ".join(map(short, saved[:MAX_NAMED]))
        found.append(f"modules_to_save has whole modules, which cannot be served: {names}")
    return found


def _kind(config: AdapterConfigFile) -> list[str]:
    if config.peft_type in (None, "LORA"):
        return []
    return [f"peft_type is {short(config.peft_type)}, and only LORA can be served"]


def _ranks(config: AdapterConfigFile, max_rank: int | None) -> list[str]:
    rank = config.rank
    if rank is None:
        return ["it has no rank (r)"]
    if rank < 1:
        return [f"its rank (r) is {rank}"]
    if max_rank is not None and rank > max_rank:
        return [f"its rank is {rank}, and the pods' max_lora_rank {max_rank}"]
    return []


logger = logging.getLogger(__name__)

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""Of these a pod reads the first one that is there."""
MAX_CONFIG_BYTES: Final = 1024 * 1024
"""Of `adapter_config.json`: it has 1 KB, and 100 KB where it lists modules one by one."""
CHECKS_PER_S: Final = 2_000
"""Adapters of one root that are looked at in a second, for 15 us of CPU each: with more of them
each is looked at less often."""
_CHUNK = 100  # adapters in one call to the disk

Stamp = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True, slots=True)
class Root:
    """A folder of adapters, as pods see it and as this process does."""

    pod: str
    router: Path


@dataclass(eq=False, slots=True)
class _Followed:
    root: Root
    folder: Path
    stamp: Stamp | None = None  # when it was last looked at or checked


class AdapterFiles:
    """Checks adapters, and follows changes of their files. Belongs to one event loop.

    Args:
        on_change: Called with the path of an adapter whose files have changed, appeared or gone
            since they were last checked or looked at.
        interval_s: From the end of one look at all of them to the next.
        timeout_s: Longest wait for a mount; the other roots do not wait for it.
    """

    def __init__(
        self,
        roots: Iterable[Root],
        *,
        on_change: Callable[[str], None],
        interval_s: float = 1.0,
        timeout_s: float = 5.0,
    ) -> None:
        # The innermost root of a path counts.
        ordered = sorted(roots, key=lambda root: len(root.pod), reverse=True)
        self._roots = {root: BlockingCalls(timeout_s) for root in ordered}
        self._on_change = on_change
        self._interval_s = interval_s
        self._followed: dict[str, _Followed] = {}

    async def check(self, path: str, *, max_rank: int | None = None) -> Result | None:
        """Return why pods would refuse the adapter in the folder that they see at `path`.

        None where they should take it, or its files cannot be seen.

        Args:
            path: The folder that a pod would have to load.
            max_rank: The pods' `--max-lora-rank`; None where unknown.
        """
        place = locate(path, self._roots)
        if place is None:
            return None
        root, folder = place

        def read() -> tuple[Stamp, Result | None]:
            return read_stamp(folder), inspect(root, folder, max_rank=max_rank)

        try:
            stamp, problem = await self._roots[root].call(read)
        except TimeoutError:
            return None
        if path in self._followed:
            self._followed[path].stamp = stamp
        return problem

    def follow(self, paths: Iterable[str]) -> None:
        """Follow the adapters in these folders alone."""
        before, self._followed = self._followed, {}
        for path in paths:
            if path in before:
                self._followed[path] = before[path]
            elif (place := locate(path, self._roots)) is not None:
                self._followed[path] = _Followed(*place)

    async def run(self) -> None:
        """Follow the files until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for root in self._roots:
                tasks.create_task(self._follow(root))

    async def _follow(self, root: Root) -> None:
        is_hung = False
        while True:
            num_seen, was_hung, is_hung = 0, is_hung, False
            try:
                num_seen = await self._check(root)
            except TimeoutError:
                is_hung = True
                if not was_hung:
                    logger.warning("%s does not answer: its adapters are not checked", root.router)
            await asyncio.sleep(max(self._interval_s, num_seen / CHECKS_PER_S))

    async def _check(self, root: Root) -> int:
        """Check each adapter of a root once; return how many there are."""
        mine = [(path, each) for path, each in self._followed.items() if each.root is root]
        for start in range(0, len(mine), _CHUNK):
            chunk = mine[start : start + _CHUNK]
            folders = [each.folder for _, each in chunk]
            stamps = await self._roots[root].call(partial(_read_stamps, folders))
            for (path, each), stamp in zip(chunk, stamps, strict=True):
                before, each.stamp = each.stamp, stamp
                if before not in (None, stamp) and path in self._followed:
                    self._on_change(path)
        return len(mine)


def locate(path: str, roots: Iterable[Root]) -> tuple[Root, Path] | None:
    """Return the first root that holds the folder that pods see at `path`, and the folder here."""
    for root in roots:
        pod = root.pod.rstrip("/")
        if path == pod or path.startswith(f"{pod}/"):
            return root, root.router / path[len(pod) :].strip("/")
    return None


def inspect(root: Root, folder: Path, *, max_rank: int | None = None) -> Result | None:
    """Check the adapter in `folder`, as `AdapterFiles.check` does. Waits for the disk."""
    if not os.path.isdir(root.router):
        return None  # not mounted here
    try:
        content = read_bytes(folder / CONFIG, max_bytes=MAX_CONFIG_BYTES, within=root.router)
        config = decode_config(content)
        _check_weights(root, folder)
    except (FileNotFoundError, NotADirectoryError):
        return _broken(f"there is no {CONFIG}")
    except UnreadableError:
        return None
    except FileError as error:
        return _broken(f"{Path(str(error.filename)).name}: {error.strerror}")
    except AdapterConfigError as error:
        return _broken(f"{CONFIG}: {error}")
    except (OSError, ValueError):  # a path with characters that no file has
        return None
    reasons = obstacles(config, max_rank=max_rank)
    return Result(Failure.REFUSED, "; ".join(reasons)) if reasons else None


def read_stamp(folder: Path) -> Stamp:
    """Return a value that changes whenever a file of the adapter in `folder` does.

    The targets of symbolic links count: Kubernetes swaps the link to the folder of a ConfigMap.
    """
    return tuple(_stamp(os.path.join(folder, name)) for name in (CONFIG, *WEIGHTS))


def _read_stamps(folders: list[Path]) -> list[Stamp]:
    return [read_stamp(folder) for folder in folders]


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _check_weights(root: Root, folder: Path) -> None:
    """Raise FileError where there are no weights."""
    for name in WEIGHTS:
        path = folder / name
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        if Path(os.path.realpath(root.router)) not in Path(os.path.realpath(path)).parents:
            raise FileError(path, f"leads out of {root.router}")
        if not stat.S_ISREG(status.st_mode) or not status.st_size:
            raise FileError(path, "empty, or not a regular file")
        return
    raise FileError(folder / WEIGHTS[0], "missing")


def _broken(reason: str) -> Result:
    return Result(Failure.FILES, reason)
