"""Endpoint pickers and model servers of others as targets: their files, and how they run."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.lab.fakepod.podserver import PodConfig
from extproc.lab.loadtest.compare import Round, Watch, run_rounds
from extproc.lab.loadtest.listing import TargetError
from extproc.lab.loadtest.programs import (
    NUM_PORTS,
    GivenPicker,
    GivenPod,
    PickerProgram,
    PodProgram,
    read_program,
)
from extproc.lab.loadtest.targets import parse_targets
from extproc.stack.processes import START_TIMEOUT_S, StackError, free_port
from tests.commandline import Command, commands, error_line, invoke
from tests.fakepods import running_pod
from tests.lab.loadtest.builders import TINY
from tests.lab.loadtest.test_loadtest_e2e import small_block
from tests.pages import ROOT, blocks

EXAMPLES = ROOT / "examples" / "loadtest"
TINY_PICKER = [sys.executable, "-m", "tests.lab.loadtest.tinypicker"]
FAKE_POD = [sys.executable, "-m", "extproc", "fake-pod", "--port", "$port"]
PEERS = os.environ.get("EXTPROC_PEERS", "")
needs_peers = pytest.mark.skipif(
    not (Path(PEERS) / "epp").is_file(), reason="EXTPROC_PEERS names no folder with llm-d's epp"
)


def written(folder: Path, name: str, **settings: Any) -> str:
    """A program's file; returns its path."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return str(path)


def tiny_picker(folder: Path, name: str, named_in: str) -> str:
    record = str(folder / f"{name}.seen")
    command = [*TINY_PICKER, "$port", "$folder/pods", named_in, record]
    return written(folder, name, command=command, files={"pods": "$pods\n"}, start_within_s=60)


# --- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_examples_are_valid(path: Path) -> None:
    kind = PodProgram if path.stem == "llmd-simulator" else PickerProgram

    assert read_program(path, kind).command


def test_the_file_on_the_page_is_valid(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "loadtest.md").read_text(encoding="utf-8")
    (text,) = (block for block in blocks(page, "yaml") if block.startswith("command:"))
    path = tmp_path / "picker.yaml"
    path.write_text(text, encoding="utf-8")

    assert read_program(path, PickerProgram).start_within_s == START_TIMEOUT_S


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("command: [a, $port]\nport: 1", "port is not a setting; allowed: command, files,"),
        ("command: [a, $port]\nadapter: $name", "adapter is not a setting; allowed: command"),
        ("pod: $address", "command must be a list of texts: the program"),
        ("command: a $port", "command must be a list of texts: the program"),
        ("command: []", "command must be a list of texts"),
        ("command: [a, 1]", "command must be a list of texts"),
        ("command: [a, $port]\nfiles: {a: 1}", "files must be the text of each file"),
        ("command: [a, $port]\nfiles: {../a: b}", "files must be the text of each file"),
        ("command: [a, $port]\nfiles: {..: b}", "files must be the text of each file"),
        ("command: [a, $port]\npod: [a]", "pod must be a text"),
        ("command: [a, $port]\nstart_within_s: 0", "start_within_s must be a number of seconds"),
        ("- a", "this is not a setting; allowed: command"),
        ("", "this is not a setting; allowed: command"),
        ("command: [a, $prot]", "there is no place $prot; allowed: $folder, $pods, $port, $port_2"),
        ("command: [a, $port]\npod: $host", "there is no place $host; allowed: $address, $name"),
        ("command: [a, $port, 5$]", "a $ without a name after it: write $$"),
        ("command: [a, $port_2]", "nothing has $port, on which it must listen"),
        ("command: [a, $port]\ncommand: [b]", "the key 'command' is given twice"),
        ("command: [", "not YAML"),
        (None, "No such file"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_its_own_words(
    text: str | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    if text is not None:
        path.write_text(text, encoding="utf-8")

    line = error_line(invoke("lab", "loadtest", "compare", "quick", "--target", f"picker:{path}"))

    assert line.startswith(f"{path}: ")
    assert message in line


def test_a_file_of_pods_is_read_with_its_own_places(tmp_path: Path) -> None:
    wrong = written(tmp_path, "wrong", command=["serve", "$port", "$pods"])

    with pytest.raises(TargetError, match=r"no place \$pods; allowed: \$adapters, \$base_model"):
        parse_targets(["policy:founding"], wrong)


def test_a_picker_is_called_as_its_file_or_as_one_says(tmp_path: Path) -> None:
    path = written(tmp_path, "mine", command=["serve", "$port"])

    first, second = parse_targets([f"picker:{path}", f"picker:{path}=other"])

    assert (first.label, second.label) == ("mine", "other")
    assert (first.text, second.text) == ("picker:mine", "picker:other")
    with pytest.raises(TargetError, match="two targets are called mine"):
        parse_targets([f"picker:{path}"] * 2)


# --- a real Envoy -------------------------------------------------------------------------------


async def compared(*targets: str, pods: str = "") -> list[Round]:
    rounds: list[Round] = []
    specs = parse_targets(targets, pods)
    await run_rounds(specs, [small_block()], rounds, headers={}, watch=Watch())
    return rounds


@pytest.mark.e2e
@pytest.mark.timeout(240)
async def test_a_picker_names_pods_in_header_or_metadata_and_sees_the_whole_exchange(
    tmp_path: Path,
) -> None:
    names = ["header", "metadata"]

    ((header, metadata),) = await compared(
        *(f"picker:{tiny_picker(tmp_path, name, name)}" for name in names)
    )

    for run, name in ((header, "header"), (metadata, "metadata")):
        assert run.result, run.trouble
        assert (run.label, run.result.errors) == (name, {})
        assert run.result.knows_pods
        assert run.result.metrics.max_over_mean_load < 2  # it named both pods
        seen = (tmp_path / f"{name}.seen").read_text(encoding="utf-8").split()
        assert {"request_headers", "request_body", "response_headers", "response_body"} <= {*seen}


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.timeout(240)
async def test_other_model_servers_stand_for_the_fake_pods(tmp_path: Path) -> None:
    command = [*FAKE_POD, "--base-model", "$base_model", "--max-loras=$max_loras"]
    command += ["--max-cpu-loras=$max_cpu_loras", "--adapter=$adapters", "--name=given-$name"]
    pods = written(tmp_path, "pods", command=command, adapter="$name")
    targets = ["policy:founding", f"picker:{tiny_picker(tmp_path, 'tiny', 'header')}"]

    ((policy, picker),) = await compared(*targets, pods=pods)

    for run in (policy, picker):
        assert run.result, run.trouble
        assert run.result.errors == {}
        assert not run.result.knows_pods


@needs_peers
@pytest.mark.e2e
@pytest.mark.timeout(240)
async def test_llm_ds_picker_and_simulator_run_by_the_example_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", f"{PEERS}{os.pathsep}{os.environ['PATH']}")
    pickers = [f"picker:{path}" for path in sorted(EXAMPLES.glob("llmd-[dil]*.yaml"))]
    pods = str(EXAMPLES / "llmd-simulator.yaml")

    for rounds in (await compared(*pickers), await compared(pickers[0], pods=pods)):
        for run in rounds[0]:
            assert run.result, run.trouble
            assert run.result.errors == {}, run.label


# --- faults -------------------------------------------------------------------------------------

IDLE = ["sleep", "600", "$port"]
"""Runs, and listens nowhere."""


@pytest.fixture
def given_port(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Gives programs a port on which the test listens; all others get free ones."""

    def give(port: int) -> None:
        monkeypatch.setattr(
            "extproc.stack.stack.free_port",
            lambda count=1: port if count == NUM_PORTS else free_port(count),
        )

    return give


@asynccontextmanager
async def deaf() -> AsyncIterator[int]:
    """A server that reads, and never answers; yields its port."""

    async def read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(read, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize(
    ("command", "within_s", "message"),
    [
        (["/nosuch/picker", "$port"], 60, "there is no program /nosuch/picker"),
        (["sh", "-c", "echo no key; exit 3", "$port"], 60, "sh ended with status 3: no key"),
        (["sh", "-c", "exit 3", "$port"], 60, "sh ended with status 3: it said nothing"),
        (IDLE, 3, "sleep runs, but after 3 s nothing listens on 127.0.0.1:"),
    ],
    ids=["no program", "exits", "exits silently", "listens elsewhere"],
)
async def test_a_program_that_does_not_start_is_one_sentence(
    command: list[str], within_s: float, message: str, tmp_path: Path
) -> None:
    path = written(tmp_path, "mine", command=command, start_within_s=within_s)
    picker = GivenPicker("picker-0", read_program(Path(path), PickerProgram), {})

    with pytest.raises(StackError, match=re.escape(message)) as raised:
        async with picker:
            pass

    assert len(str(raised.value).splitlines()) == 1
    assert not picker.is_running
    assert not picker.dir.exists()


async def test_a_model_server_must_list_its_adapters(
    tmp_path: Path, given_port: Callable[[int], None]
) -> None:
    path = written(tmp_path, "pods", command=IDLE, start_within_s=5)
    config = PodConfig(adapters={"a": "/a", "b": "/b"}, ranks_by_path={"/a": 8, "/b": 8})
    program = read_program(Path(path), PodProgram)
    async with running_pod(PodConfig(adapters=["a"])) as running:
        given_port(int(running.address.rpartition(":")[2]))

        with pytest.raises(StackError, match="pod-0: sleep runs, .* it does not list b$"):
            async with GivenPod(program, "pod-0", config):
                pass


async def test_a_model_server_that_does_not_answer_is_named(
    tmp_path: Path, given_port: Callable[[int], None]
) -> None:
    path = written(tmp_path, "pods", command=IDLE, start_within_s=3)
    program = read_program(Path(path), PodProgram)
    config = PodConfig(ranks_by_path={})

    with pytest.raises(StackError, match="/v1/models: Cannot connect"):
        async with GivenPod(program, "pod-0", config):
            pass
    async with deaf() as port:
        given_port(port)
        with pytest.raises(StackError, match=rf"does not answer on 127.0.0.1:{port}, its \$port"):
            async with GivenPod(program, "pod-0", config):
                pass


@pytest.mark.e2e
@pytest.mark.timeout(240)
async def test_a_picker_that_never_answers_envoy_is_named(
    tmp_path: Path, given_port: Callable[[int], None]
) -> None:
    path = written(tmp_path, "mine", command=IDLE, start_within_s=5)
    async with deaf() as port:
        given_port(port)

        with pytest.raises(TargetError, match="^mine: the picker does not answer Envoy") as raised:
            await compared(f"picker:{path}")

    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.timeout(240)
def test_a_target_that_does_not_start_fails_the_command_and_leaves_nothing(tmp_path: Path) -> None:
    suite = tmp_path / "tiny.yaml"
    suite.write_text(TINY, encoding="utf-8")
    path = written(tmp_path, "mine", command=["sh", "-c", "exit 3", "$port"])
    target = ["--target", "envoy:round_robin", "--target", f"picker:{path}"]

    with commands() as started:
        run = Command(tmp_path, "lab", "loadtest", "compare", str(suite), *target)
        started.append(run)

        assert run.process.wait() == 1, run.output
        assert "extproc: mine: picker-0: sh ended with status 3" in run.output
        run.wait_until_gone()
    assert list(tmp_path.glob("extproc-*")) == []
