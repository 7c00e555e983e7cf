"""Control headers: which are read, what is refused, and that all of them are named for removal."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core import hints
from extproc.core.errors import RequestError
from extproc.core.hints import CONTROL_HEADERS, HINT_HEADERS, MAX_NAME_BYTES, TRUSTABLE
from extproc.core.types import NO_HINTS, Hints, Reason

NAMES = {
    "objective": ("x-llm-d-inference-objective", "x-gateway-inference-objective"),
    "fairness_id": ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id"),
}
MODELS = {"model_rewrite": ("x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite")}
NUMBERS = {
    "slo_ttft_ms": ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"),
    "slo_tpot_ms": ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms"),
}
BOTH = [(field, *names) for field, names in (NAMES | NUMBERS | MODELS).items()]


def read_hints(headers: dict[str, str], trusted: tuple[str, ...] = TRUSTABLE) -> Hints:
    return hints.read_hints(headers, frozenset(trusted))


def test_a_request_without_control_headers_has_no_hints() -> None:
    assert read_hints({":path": "/v1/completions", "x-request-id": "r"}) is NO_HINTS


@pytest.mark.parametrize(("field", "name", "older"), BOTH)
def test_each_hint_has_two_names_and_the_newer_one_counts(
    field: str, name: str, older: str
) -> None:
    new, old, both = (
        getattr(read_hints(headers), field)
        for headers in ({name: "250"}, {older: "250"}, {older: "1", name: "250"})
    )

    assert new == old == both
    assert float(new) == 250


@pytest.mark.parametrize(("field", "name", "older"), BOTH)
def test_an_empty_header_is_none_and_is_removed_all_the_same(
    field: str, name: str, older: str
) -> None:
    found = read_hints({name: " "})

    assert found == Hints(header_names=(name,))
    assert getattr(read_hints({name: "", older: "7"}), field) in ("7", 7.0)


@pytest.mark.parametrize("name", sorted(CONTROL_HEADERS - HINT_HEADERS))
@pytest.mark.parametrize("value", ["", "anything", "x" * 1000])
def test_a_control_header_that_nothing_here_reads_is_removed_whatever_it_says(
    name: str, value: str
) -> None:
    assert read_hints({name: value}) == Hints(header_names=(name,))


def test_control_headers_of_all_kinds_are_removed_together() -> None:
    headers = dict.fromkeys(CONTROL_HEADERS, "1")

    assert set(read_hints(headers).header_names) == CONTROL_HEADERS
    assert "x-llm-d-inference-ttl" in CONTROL_HEADERS


@pytest.mark.parametrize("name", [name for names in NUMBERS.values() for name in names])
@pytest.mark.parametrize(
    "value", ["fast", "-1", "0", "0.0", "1e3", "nan", "inf", "1,5", "0x10", "٣", "1" * 13, "1 2"]
)
def test_a_time_that_is_not_a_positive_number_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_hints({name: value})

    rejection = caught.value.rejection
    assert (rejection.status, rejection.reason) == (400, Reason.INVALID_HEADER)
    assert rejection.param == name
    assert value not in rejection.message


@pytest.mark.parametrize(("value", "expected"), [("200", 200.0), ("0.5", 0.5), (" 7 ", 7.0)])
def test_a_time_may_have_a_fraction(value: str, expected: float) -> None:
    assert read_hints({"x-llm-d-slo-tpot-ms": value}).slo_tpot_ms == expected


@pytest.mark.parametrize("name", [name for names in NAMES.values() for name in names])
def test_a_name_longer_than_any_object_s_is_refused(name: str) -> None:
    assert read_hints({name: "x" * MAX_NAME_BYTES}) != NO_HINTS
    with pytest.raises(RequestError) as caught:
        read_hints({name: "x" * (MAX_NAME_BYTES + 1)})

    assert caught.value.rejection.param == name


@pytest.mark.parametrize("name", MODELS["model_rewrite"])
@pytest.mark.parametrize("value", ["a\tb", "\xe9", "x" * 257])
def test_a_name_that_no_model_can_have_is_refused(name: str, value: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_hints({name: value})

    assert caught.value.rejection.param == name


@given(st.dictionaries(st.sampled_from(sorted(CONTROL_HEADERS)), st.text(max_size=300)))
def test_whatever_they_say_they_are_refused_or_all_named(headers: dict[str, str]) -> None:
    with suppress(RequestError):
        assert set(read_hints(headers).header_names) == set(headers)


# --- trust -----------------------------------------------------------------------------------


@given(st.dictionaries(st.sampled_from(sorted(CONTROL_HEADERS)), st.text(max_size=300)))
def test_headers_that_are_not_trusted_say_nothing_and_are_not_even_checked(
    headers: dict[str, str],
) -> None:
    assert read_hints(headers, ()) == Hints(header_names=tuple(sorted(headers)))


@pytest.mark.parametrize(
    ("trusted", "fields"),
    [
        ("objective", {"objective"}),
        ("fairness_id", {"fairness_id"}),
        ("slo", {"slo_ttft_ms", "slo_tpot_ms"}),
        ("model_rewrite", {"model_rewrite"}),
    ],
)
def test_each_kind_of_header_is_trusted_by_itself(trusted: str, fields: set[str]) -> None:
    found = read_hints(dict.fromkeys(HINT_HEADERS, "7"), (trusted,))

    said = {name for name in Hints.__struct_fields__ if getattr(found, name) not in ("", None)}
    assert said == fields | {"header_names"}
