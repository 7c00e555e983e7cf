"""Programs of others in a load test, each by a small YAML file: endpoint pickers and model servers.

A file has the command, and texts of files that it reads. Both have places, such as `$port`, that
each process gets its own values for. A process is ready when it listens on its `$port`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Annotated, ClassVar, TypeVar

import msgspec

from extproc.files.reading import describe_failure, read_text
from extproc.files.yamltext import load_yaml
from extproc.lab.fakepod.config import PodConfig
from extproc.lab.loadtest.listing import TargetError, fetch_listing
from extproc.stack.processes import START_TIMEOUT_S, StackError
from extproc.stack.stack import PortProcess

NUM_PORTS = 4
_OWN = ("folder", "port", *(f"port_{number}" for number in range(2, NUM_PORTS + 1)))
_MUST = {
    "command": "a list of texts: the program, and its arguments",
    "files": "the text of each file by its name",
    "pod": "a text: how one pod is written in $pods",
    "adapter": "a text: how one adapter is written in $adapters",
    "start_within_s": "a number of seconds above 0",
}
_FileName = Annotated[str, msgspec.Meta(pattern=r"^[^/]*[^/.][^/]*$")]
_ProgramT = TypeVar("_ProgramT", bound="Program")


class Program(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a program is started.

    Places of all: `$port` and `$port_2` to `$port_4`, free ports; `$folder`, where its files are.
    A list as an argument is one for each of its items; within an argument these have commas
    between, in a file each has a line.

    Attributes:
        command: The program and its arguments.
        files: Files that it reads, by their names in `$folder`.
        start_within_s: How long it may take until it listens.
        item: How an item of the list is written.
    """

    places: ClassVar[tuple[str, ...]] = ()
    list_name: ClassVar[str]
    item_places: ClassVar[tuple[str, ...]]

    command: Annotated[list[str], msgspec.Meta(min_length=1)]
    files: dict[_FileName, str] = {}
    start_within_s: Annotated[float, msgspec.Meta(gt=0)] = START_TIMEOUT_S
    item: str


class PickerProgram(Program, frozen=True, kw_only=True):
    """An endpoint picker: an external processor that answers with a pod's address."""

    list_name = "pods"
    item_places = ("address", "name", "port", "url")

    item: str = msgspec.field(name="pod", default="$address")


class PodProgram(Program, frozen=True, kw_only=True):
    """A model server with OpenAI's API."""

    places = ("base_model", "max_cpu_loras", "max_lora_rank", "max_loras", "name")
    list_name = "adapters"
    item_places = ("base_model", "name", "path", "rank")

    item: str = msgspec.field(name="adapter", default="$name=$path")


def read_program(path: Path, kind: type[_ProgramT]) -> _ProgramT:
    """Read a program's file.

    Raises:
        TargetError: It cannot be read, or is not valid.
    """
    try:
        found = msgspec.convert(load_yaml(read_text(path)), kind)
        used = _used([*found.command, *found.files.values()], *_OWN, *kind.places, kind.list_name)
        _used([found.item], *kind.item_places)
    except msgspec.ValidationError as error:
        raise TargetError(f"{path}: {_sentence(str(error), kind)}") from error
    except (OSError, ValueError) as error:
        raise TargetError(f"{path}: {describe_failure(error)}") from error
    if "port" not in used:
        raise TargetError(f"{path}: nothing has $port, on which it must listen")
    return found


def _sentence(error: str, kind: type[Program]) -> str:
    """Return msgspec's message in words of the file."""
    found = re.search(r"field `(\w*)|`\$\.(\w+)", error)
    name, allowed = (found and (found[1] or found[2])) or "this", kind.__struct_encode_fields__
    if name in allowed:
        return f"{name} must be {_MUST[name]}"
    return f"{name} is not a setting; allowed: {', '.join(allowed)}"


def _used(texts: Sequence[str], *known: str) -> set[str]:
    """Return the places in these texts.

    Raises:
        ValueError: One is not known.
    """
    templates = [*map(Template, texts)]
    if not all(each.is_valid() for each in templates):
        raise ValueError("there is a $ without a name after it: write $$")
    used = {name for each in templates for name in each.get_identifiers()}
    if unknown := sorted(used.difference(known)):
        raise ValueError(f"there is no place ${unknown[0]}; allowed: ${', $'.join(sorted(known))}")
    return used


# --- running ----------------------------------------------------------------------------------


class _Given(PortProcess):
    """A process of a program, on ports of its own.

    Args:
        name: For messages.
        program: How it is started.
        places: Its values of the program's own places.
        items: Of each item of its list, the values of that one's places.
    """

    def __init__(
        self,
        name: str,
        program: Program,
        places: Mapping[str, object],
        items: Sequence[Mapping[str, object]],
    ) -> None:
        super().__init__(name, NUM_PORTS)
        ports = {f"port_{n + 1}": self.port + n for n in range(1, NUM_PORTS)}
        self._program = program
        self._why = f"it does not answer on {self.address}, its $port"
        self._places = {"port": self.port, "folder": self.dir, **ports, **places}
        self._items = [Template(program.item).substitute(each) for each in items]

    async def start(self) -> None:
        """Start the process, and return once it is ready.

        Raises:
            StackError: It cannot be started, or does not become ready.
        """
        program = self._program
        for name, text in program.files.items():
            (self.dir / name).write_text(self._filled(text, "\n"), encoding="utf-8")
        command = [part for text in program.command for part in self._arguments(text)]
        try:
            self.spawn(command)
        except StackError as error:
            raise StackError(f"there is no program {command[0]}") from error
        try:
            await self.wait_until(self._is_ready, program.start_within_s)
        except StackError as error:
            raise StackError(self._failed(command[0])) from error

    def _arguments(self, text: str) -> list[str]:
        if text == f"${self._program.list_name}":
            return self._items
        return [self._filled(text, ",")]

    def _filled(self, text: str, between: str) -> str:
        items = {self._program.list_name: between.join(self._items)}
        return Template(text).substitute(self._places, **items)

    def _failed(self, command: str) -> str:
        if self.is_running:
            within = f"{self._program.start_within_s:g} s"
            return f"{self.name}: {command} runs, but after {within} {self._why}"
        said = self.log.strip().rpartition("\n")[2] or "it said nothing"
        return f"{self.name}: {command} ended with status {self.returncode}: {said}"

    async def _is_ready(self) -> bool:
        """Return whether it is ready; if not, `_why` says why."""
        raise NotImplementedError


class GivenPicker(_Given):
    """An endpoint picker for these pods, by name."""

    def __init__(self, name: str, program: PickerProgram, pods: Mapping[str, PortProcess]) -> None:
        items = [
            {each: getattr(pod, each) for each in program.item_places} for pod in pods.values()
        ]
        super().__init__(name, program, {}, items)

    async def _is_ready(self) -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            self._why = f"nothing listens on {self.address}, its $port"
            return False
        writer.close()
        return True


class GivenPod(_Given):
    """A model server with the adapters of a fake pod."""

    def __init__(self, program: PodProgram, name: str, config: PodConfig) -> None:
        ranks = config.ranks_by_path or {}
        common = {"base_model": config.base_model}
        items = [
            {**common, "name": adapter, "path": path, "rank": ranks[path]}
            for adapter, path in config.adapter_paths.items()
        ]
        places = {each: getattr(config, each) for each in PodProgram.places}
        places["max_cpu_loras"] = config.max_cpu_loras or config.max_loras
        super().__init__(name, program, places, items)
        self._adapters = {*config.adapter_paths}

    async def _is_ready(self) -> bool:
        try:
            listing = await fetch_listing(self.url, {})
        except TargetError as error:
            self._why = str(error)
            return False
        lacks = sorted(self._adapters - {card.id for card in listing.cards})
        self._why = f"it does not list {', '.join(lacks)}"
        return not lacks
