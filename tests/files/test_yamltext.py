"""YAML from operators: one kind of error, and an end to everything."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from extproc.files.yamltext import (
    MAX_CHARS,
    MAX_DEPTH,
    MAX_VALUE_CHARS,
    MAX_VALUES,
    YamlError,
    load_yaml,
)

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 10)
)
"""Nine to the power of ten values."""


def num_values(value: Any) -> int:
    """As far as the limit; what a reader of the value would look at."""
    total, todo = 0, [value]
    while todo and total <= 2 * MAX_VALUES:
        each = todo.pop()
        total += 1
        if isinstance(each, dict):
            todo += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple | set):
            todo += each
    return total


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, f"more than {MAX_VALUES} values, aliases written out"),
        ("a: &a [*a]", f"more than {MAX_VALUES} values, aliases written out"),
        ("&a {b: {c: *a}}", f"more than {MAX_VALUES} values, aliases written out"),
        ("[" * (MAX_DEPTH + 2), f"more than {MAX_DEPTH} collections in one another"),
        ("- " * (MAX_DEPTH + 1) + "x", f"more than {MAX_DEPTH} collections in one another"),
        ("[" * MAX_DEPTH + "]" * MAX_DEPTH, None),
        ("- " * MAX_DEPTH + "x", None),
        ("[" + "x, " * MAX_VALUES + "]", f"more than {MAX_VALUES} values"),
        ("x" * (MAX_CHARS + 1), f"more than {MAX_CHARS} characters"),
        ("1" + ":1" * 300_000, f"a value of more than {MAX_VALUE_CHARS} characters"),
        ("a: *nothing", "line 1, column 4: found undefined alias 'nothing'"),
        ("a: 1\nb: 2\na: 3", "line 3, column 1: the key 'a' is given twice"),
        ("a: &a {}\nb: {<<: *a, <<: *a}", "line 2, column 13: the key '<<' is given twice"),
        ("a: {<<: b}", "line 1, column 9: << must name a mapping, or a list of them"),
        ("a: &a {<<: *a}", f"more than {MAX_VALUES} values, aliases written out"),
        ("a: &a {x: 1}\nb: {<<: *a, x: 2, x: 3}", "line 2, column 19: the key 'x' is given twice"),
        ("a: [", "line 1, column 5: "),
        ("a: 1\n---\nb: 2", "not YAML: line 2"),
        ("!!python/object:os.system {}", "could not determine a constructor"),
        ("!!bool x", "not YAML: 'x'"),
        ("!!int ''", "not YAML: "),
        ("2024-13-45", "not YAML: month must be"),
        ("9" * 4096, None),
        ("a\x00", "not YAML: unacceptable character"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_every_yaml_error_is_one_line(text: str, message: str | None) -> None:
    if message is None:
        load_yaml(text)
        return
    with pytest.raises(YamlError, match=message) as error:
        load_yaml(text)

    assert len(str(error.value).splitlines()) == 1
    assert str(error.value).isprintable()


def test_a_safe_loader_alone_takes_few_lines_that_stand_for_billions_of_values() -> None:
    assert num_values(yaml.safe_load(BOMB)) > MAX_VALUES


def test_aliases_that_stand_for_little_are_taken() -> None:
    assert load_yaml("a: &x {b: [1, 2]}\nc: *x\nd: [*x, *x]") == {
        "a": {"b": [1, 2]},
        "c": {"b": [1, 2]},
        "d": [{"b": [1, 2]}] * 2,
    }


def test_a_mapping_may_take_over_anothers_keys_and_have_its_own_instead() -> None:
    nested = "c: {d: &d {<<: *a, x: 2}}"  # PyYAML makes the outer mappings first

    assert load_yaml(
        f"a: &a {{x: 1, y: 1}}\n{nested}\ne: {{<<: *d, y: 3}}\nf: {{<<: [*d, *a]}}"
    ) == {
        "a": {"x": 1, "y": 1},
        "c": {"d": {"x": 2, "y": 1}},
        "e": {"x": 2, "y": 3},
        "f": {"x": 2, "y": 1},
    }


def test_an_empty_text_is_nothing() -> None:
    assert load_yaml("") is load_yaml("# only a comment\n") is None


def test_written_yaml_is_read_unchanged() -> None:
    shared = {"address": "10.0.0.7:8000", "name": "a"}
    document = {"static": [shared, shared], "rate": 0.5, "on": True, "none": None}

    assert load_yaml(yaml.safe_dump(document)) == document


pieces = st.sampled_from(
    [
        *(
            "a",
            "b: ",
            "- ",
            "? ",
            "[",
            "]",
            "{",
            "}",
            ", ",
            "\n",
            "\n  ",
            "&x ",
            "*x",
            "<<: ",
            ": ",
        ),
        *(
            "!!int ",
            "!!float ",
            "!!bool ",
            "!!set ",
            "!!omap ",
            "!!pairs ",
            "!!timestamp ",
            "!!map ",
        ),
        *("!!binary ", "!!null ", "!!python/name:os.system ", "!x ", "'", '"', "|", ">", "#", "%"),
        *("1:2", "0x", "0b", ".inf", ".nan", "2024-13-45", "---\n", "...\n", "\x00", "\ud800", "é"),
    ]
)


@given(st.one_of(st.text(max_size=200), st.lists(pieces, max_size=60).map("".join)))
@example("!!set [1]")
@example("? {a: 1}\n: 2")
@example("!!timestamp x")
@example("&x {*x : 1}")
def test_any_text_is_a_bounded_value_or_a_yaml_error(text: str) -> None:
    try:
        value = load_yaml(text)
    except YamlError as error:
        lines = str(error).splitlines()
    else:
        lines = ["none"] if num_values(value) <= MAX_VALUES else []

    assert len(lines) == 1


@given(st.lists(st.integers(1, 12), min_size=1, max_size=12))
def test_aliases_in_aliases_stay_within_the_limit(widths: list[int]) -> None:
    lines = ["a0: &a0 [x]"]
    for level, width in enumerate(widths, start=1):
        aliases = ", ".join([f"*a{level - 1}"] * width)
        lines.append(f"a{level}: &a{level} [{aliases}]")
    text = "\n".join(lines)
    sizes = [2]  # of each level's list, with the list itself
    for width in widths:
        sizes.append(width * sizes[-1] + 1)
    if sum(sizes) + len(sizes) + 1 > MAX_VALUES:  # the keys, and the mapping of them all
        with pytest.raises(YamlError, match="aliases written out"):
            load_yaml(text)
    else:
        assert num_values(load_yaml(text)) == sum(sizes) + len(sizes) + 1
