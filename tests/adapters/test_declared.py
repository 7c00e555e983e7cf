"""What may be declared."""

from __future__ import annotations

import pytest

from extproc.adapters.declared import Declaration, DeclarationError, Names, check_fallback
from tests.adapters.declarable import BAD, BAD_FALLBACKS, GOOD, Fields


def of(fields: Fields) -> Declaration:
    plain = {key: value for key, value in fields.items() if key != "replicas"}
    bounds = {f"{key}_replicas": value for key, value in fields.get("replicas", {}).items()}
    return Declaration(**plain, **bounds)


@pytest.mark.parametrize("fields", GOOD, ids=str)
def test_a_declaration_that_pods_can_serve_stands(fields: Fields) -> None:
    of(fields).check()


@pytest.mark.parametrize(("fields", "why"), [each[:2] for each in BAD], ids=str)
def test_a_declaration_that_no_pod_can_serve_is_refused_and_told_why(
    fields: Fields, why: str
) -> None:
    with pytest.raises(DeclarationError) as refused:
        of(fields).check()

    assert why in str(refused.value)
    assert len(str(refused.value)) < 400


def test_a_fallback_is_another_model_that_can_be_asked_for() -> None:
    check_fallback("b", "a")
    for fallback, why in BAD_FALLBACKS:
        with pytest.raises(DeclarationError, match=why):
            check_fallback(fallback, "a")


def test_pods_have_a_version_under_a_name_of_its_own() -> None:
    assert Declaration("sql").served_name == "sql"
    assert Declaration("sql", version="2").served_name == "sql@2"


@pytest.mark.parametrize(
    ("there", "name"),
    [("sql", "sql@2"), ("sql@2", "sql"), ("sql@a@1", "sql@a"), ("sql@a", "sql@a@1")],
)
def test_two_names_that_one_served_name_can_mean_do_not_stand_together(
    there: str, name: str
) -> None:
    assert f"{there}, which is declared" in Names([there]).why_not(name)


@pytest.mark.parametrize("name", ["sql", "SQL", "sql@", "@2", "sql@2@3", "sql-2", "sq", "other@2"])
def test_names_that_differ_otherwise_are_different_adapters(name: str) -> None:
    assert Names(["sql"]).why_not(name) == ""
