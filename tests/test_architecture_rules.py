"""Each rule of `tests.test_architecture` holds of a small tree, and fails once a fault is there."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from functools import partial

import pytest

from tests import test_architecture as rules

FAILURES = AssertionError, pytest.fail.Exception
SOUND = {
    "extproc.files.a": "import json",
    "extproc.wire.b": "import extproc.files.a, extproc.errors",
    "extproc.errors": "class FirstError(Exception): pass",
    "extproc.lab.engine.c": "import extproc.lab.workload.d",
    "extproc.lab.workload.d": "class Made:\n    def __init__(self):\n        self.x = 1",
}
Rule = Callable[[], None]
FAULTS: tuple[tuple[Rule, Mapping[str, str]], ...] = (
    (rules.test_every_module_is_in_a_room, {"extproc.cellar.e": ""}),
    (
        partial(rules.test_a_room_imports_only_along_its_arrows, "wire"),
        {"extproc.wire.e": "from extproc.queue import queue"},
    ),
    (
        partial(rules.test_words_import_words_alone, "errors"),
        {"extproc.errors": "import extproc.wire.b"},
    ),
    (
        partial(rules.test_a_room_of_the_laboratory_imports_only_along_its_arrows, "workload"),
        {"extproc.lab.workload.e": "import extproc.lab.engine.c"},
    ),
    (rules.test_imports_have_no_circle, {"extproc.files.a": "import extproc.wire.b"}),
    (
        rules.test_pure_files_import_pure_ones_and_a_short_list,
        {"extproc.queue.e": "def f():\n    import time"},
    ),
    (rules.test_pure_files_do_not_wait, {"extproc.queue.e": "async def f(): pass"}),
    (
        rules.test_no_attribute_is_set_outside_of_its_class,
        {"extproc.config.e": "def f(pool):\n    pool.on_end = 1"},
    ),
    (
        rules.test_policies_see_snapshots_and_never_the_pool,
        {"extproc.routing.policies.e": "import extproc.pods.pool"},
    ),
    (
        rules.test_only_the_codec_and_the_services_import_protobuf_messages,
        {"extproc.wire.rpc": "import google.protobuf.message"},
    ),
    (
        rules.test_contexts_of_tls_are_made_in_one_place,
        {"extproc.wire.e": "import ssl\nssl.create_default_context()"},
    ),
    (
        rules.test_no_name_of_a_file_occurs_in_more_than_two_rooms,
        dict.fromkeys(("extproc.queue.a", "extproc.pods.a"), ""),
    ),
    (
        rules.test_no_room_is_above_its_ceiling,
        {"extproc.errors": "a = 1\n" * (1 + rules.CEILINGS["errors"])},
    ),
    (rules.test_a_class_s_name_is_given_once, {"extproc.wire.e": "class Made: pass"}),
    (rules.test_a_file_s_name_is_given_once, {"extproc.wire.a": ""}),
    (
        rules.test_no_room_reads_what_policies_may_not,
        {
            "extproc.types": "class View:\n    name: str\n    _num: int = 0",
            "extproc.queue.e": "def f(view): return view._num",
        },
    ),
    (
        rules.test_the_name_of_a_part_is_one_that_a_newcomer_guesses,
        {"extproc.wire.e": "class _Scene: pass"},
    ),
    (
        rules.test_the_name_of_a_part_is_one_that_a_newcomer_guesses,
        {"extproc.wire.e": "_Row = tuple[int, str]"},
    ),
    (rules.test_the_name_of_a_part_is_one_that_a_newcomer_guesses, {"extproc.wire.usual": ""}),
    (
        rules.test_the_name_of_a_part_is_one_that_a_newcomer_guesses,
        {"extproc.wire.e": "class PassTurns: pass"},
    ),
    (
        rules.test_the_name_of_a_part_is_one_that_a_newcomer_guesses,
        {"extproc.wire.e": "FIRST, MAX_TOLD = 1, 2"},
    ),
    (
        rules.test_the_name_of_a_part_is_one_that_a_newcomer_guesses,
        {"extproc.wire.e": "class Line:\n    def _look_at(self): self._others = 1"},
    ),
    (
        rules.test_the_name_of_a_part_is_one_that_a_newcomer_guesses,
        {"extproc.wire.e": "def asked_in_vain(): pass"},
    ),
)


def have(sources: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the rules read these instead of the package."""
    trees = {module: ast.parse(source) for module, source in sources.items()}
    monkeypatch.setattr(rules, "trees", lambda: trees)
    monkeypatch.setattr(rules, "STATE", {})


@pytest.mark.parametrize(("rule", "fault"), FAULTS)
def test_a_rule_fails_by_a_fault_alone(
    rule: Rule, fault: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    have(SOUND, monkeypatch)
    rule()
    have({**SOUND, **fault}, monkeypatch)

    with pytest.raises(FAILURES):
        rule()


@pytest.mark.parametrize(
    ("rule", "module"),
    [
        (rules.test_no_file_is_called_impure_that_is_pure, "extproc.wire.server"),
        (rules.test_no_exception_is_without_need, "extproc.wire.headers"),
        (rules.test_every_arrow_is_used, "extproc.plugins"),
    ],
)
def test_a_list_that_names_more_than_there_is_fails(
    rule: Rule, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = {name: tree for name, tree in rules.trees().items() if name != module}
    if rule is not rules.test_no_file_is_called_impure_that_is_pure:
        left[module] = ast.parse("")
    monkeypatch.setattr(rules, "trees", lambda: left)

    with pytest.raises(FAILURES):
        rule()


def test_every_rule_is_seen_to_fail() -> None:
    tried = {getattr(rule, "func", rule) for rule, _ in FAULTS}
    there = {rule for name, rule in vars(rules).items() if name.startswith("test_")}
    names = sorted(rule.__name__ for rule in there - tried)

    assert names == [
        "test_a_context_of_tls_that_is_made_elsewhere_is_found",
        "test_an_arrow_that_contributing_does_not_tell_is_found",
        "test_an_arrow_without_an_import_is_found",
        "test_contributing_tells_the_arrows",
        "test_every_arrow_is_used",
        "test_no_exception_is_without_need",
        "test_no_file_is_called_impure_that_is_pure",
        "test_what_is_set_outside_of_its_class_is_found",
    ]
