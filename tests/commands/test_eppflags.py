"""Command lines in Go's manner: every style that is in use, and clear words about the others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.commands.eppflags import (
    FlagError,
    FlagKind,
    parse_flags,
    to_bool,
    to_bytes,
    to_int,
    to_seconds,
)


def test_a_flag_that_may_not_be_repeated_takes_one_value() -> None:
    once = {"unrepeated": ["pool-name"]}

    assert parse_flags(["--pool-name=a", "-v=1", "--poolName", "a", "-v=2"], KINDS, **once) == {
        "pool-name": "a",
        "v": "2",
    }
    with pytest.raises(FlagError, match="'a' and 'b': it takes one value"):
        parse_flags(["--pool-name=a", "--pool-name=b"], KINDS, **once)


KINDS = {"pool-name": FlagKind.TEXT, "secure-serving": FlagKind.SWITCH, "v": FlagKind.NUMBER}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--pool-name", "p"],
        ["--pool-name=p"],
        ["-pool-name", "p"],
        ["-poolName", "p"],
        ["--poolName=p"],
        ["--pool_name", "p"],
        ["--pool-name", "first", "--pool-name", "p"],
    ],
    ids=" ".join,
)
def test_a_value_comes_in_every_style_and_the_last_one_counts(arguments: list[str]) -> None:
    assert parse_flags(arguments, KINDS) == {"pool-name": "p"}


@pytest.mark.parametrize(
    "arguments", [["-v", "4"], ["-v=4"], ["--v=4"], ["--v", "4"]], ids=" ".join
)
def test_verbosity_comes_with_one_dash_or_two(arguments: list[str]) -> None:
    assert parse_flags(arguments, KINDS) == {"v": "4"}


def test_a_bare_switch_is_true_and_takes_no_value_from_behind_it() -> None:
    found = parse_flags(["--secure-serving", "--pool-name", "p"], KINDS)

    assert found == {"secure-serving": "true", "pool-name": "p"}
    with pytest.raises(FlagError, match="--name=false"):
        parse_flags(["--secure-serving", "false"], KINDS)


def test_a_value_may_be_empty_or_hold_an_equals_sign() -> None:
    found = parse_flags(["--pool-name=", "--pool-name", "app=vllm,tier in (a,b)"], KINDS)

    assert found == {"pool-name": "app=vllm,tier in (a,b)"}
    assert parse_flags(["--pool-name="], KINDS) == {"pool-name": ""}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nope"], "--nope: unknown flag"),
        (["--nope=1"], "--nope: unknown flag"),
        (["--pool-name"], "--pool-name: needs a value"),
        (["stray"], "stray: not a flag"),
        (["-"], "-: not a flag"),
        (["--"], "--: not a flag"),
        (["---v=1"], "---v=1: not a flag"),
    ],
)
def test_what_is_not_understood_is_named(arguments: list[str], words: str) -> None:
    with pytest.raises(FlagError, match=words):
        parse_flags(arguments, KINDS)


@given(st.lists(st.text(max_size=12), max_size=6))
def test_any_command_line_is_read_or_refused_in_words(arguments: list[str]) -> None:
    try:
        found = parse_flags(arguments, KINDS)
    except FlagError as error:
        message = str(error)
        assert message
    else:
        assert found.keys() <= KINDS.keys()


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        *(("50ms", 0.05), ("2s", 2.0), ("1m30s", 90.0), ("1h", 3600.0), ("1.5s", 1.5)),
        *(("0", 0.0), ("0s", 0.0), ("250us", 0.00025), ("100ns", 1e-7)),
    ],
)
def test_durations_are_go_s(written: str, seconds: float) -> None:
    assert to_seconds("d", written) == pytest.approx(seconds)


@pytest.mark.parametrize("written", ["", "5", "5 s", "s", "-1s", "1d", "1s2", "x1s", "1e3s"])
def test_what_is_no_duration_is_refused(written: str) -> None:
    with pytest.raises(FlagError, match="--d: .* duration"):
        to_seconds("d", written)


@pytest.mark.parametrize(
    ("written", "size"),
    [
        *(("4194304", 4194304), ("10MiB", 10 * 2**20), ("10Mi", 10 * 2**20)),
        *(("25MB", 25_000_000), ("25M", 25_000_000), ("1Gi", 2**30), ("8KiB", 8192), ("0", 0)),
    ],
)
def test_sizes_are_quantities_with_or_without_a_b(written: str, size: int) -> None:
    assert to_bytes("s", written) == size


@pytest.mark.parametrize("written", ["", "-1", "1.5Mi", "MiB", "10 MiB", "1Ti", "0x10"])
def test_what_is_no_size_is_refused(written: str) -> None:
    with pytest.raises(FlagError, match="--s: .* size"):
        to_bytes("s", written)


def test_switches_and_numbers_are_go_s() -> None:
    assert [to_bool("b", value) for value in ("1", "t", "TRUE", "True", "true")] == [True] * 5
    assert [to_bool("b", value) for value in ("0", "f", "FALSE", "False", "false")] == [False] * 5
    assert [to_int("n", value) for value in ("0", "-4", "65535")] == [0, -4, 65535]


@pytest.mark.parametrize("written", ["", "yes", "no", "tRUE", "2"])
def test_what_is_no_switch_is_refused(written: str) -> None:
    with pytest.raises(FlagError, match="--b: .* true or false"):
        to_bool("b", written)


@pytest.mark.parametrize("written", ["", "x", "1.5", "1_000", "0x10", "+1", "9" * 19])
def test_what_is_no_number_is_refused(written: str) -> None:
    with pytest.raises(FlagError, match="--n: .* whole number"):
        to_int("n", written)
