"""Control headers: which are read, what is refused, and that all of them are named for removal."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import RequestError
from extproc.request import controlheaders
from extproc.request.controlheaders import (
    CONTROL_HEADERS,
    HINT_HEADERS,
    MAX_NAME_BYTES,
    TRUSTABLE,
    names_of,
)
from extproc.types import NO_HINTS, Hints, Reason

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
    return controlheaders.read_hints(headers, names_of(trusted))


def test_a_request_without_control_headers_has_no_hints() -> None:
    assert read_hints({":path": "/v1/completions", "x-request-id": "r"}) is NO_HINTS


@pytest.mark.parametrize(("field", "name", "older"), BOTH)
def test_each_hint_has_two_names_of_one_value(field: str, name: str, older: str) -> None:
    one = ({name: "250"}, {older: "250"}, {older: "250", name: " 250"}, {name: "250, 250"})
    for headers in one:
        assert float(getattr(read_hints(headers), field)) == 250


@pytest.mark.parametrize(("field", "name", "older"), BOTH)
@pytest.mark.parametrize("gateways", ["250", ""])
@pytest.mark.parametrize("clients", ["7", "", "250,7", ","])
def test_what_a_client_adds_to_what_the_gateway_sets_is_the_same_or_refused(
    field: str, name: str, older: str, gateways: str, clients: str
) -> None:
    """Under the other name, or under the same one: Envoy sends both, other gateways join them."""
    for headers in (
        {name: gateways, older: clients},
        {name: clients, older: gateways},
        {name: f"{clients},{gateways}"},
        {older: f"{gateways},{clients}"},
    ):
        try:
            found = getattr(read_hints(headers), field)
        except RequestError as error:
            rejection = error.rejection
            assert (rejection.status, rejection.reason) == (400, Reason.INVALID_HEADER)
            assert rejection.param in headers
        else:
            assert clients.strip(",") == gateways == (found or "")


CLIENTS = st.sampled_from(["", " ", "acme", "evil", "acme,", "acme, evil", ",", "7"])


@given(
    st.sampled_from(sorted(HINT_HEADERS)),
    st.sampled_from(["acme", "7", "250"]),
    st.lists(st.tuples(st.sampled_from(sorted(CONTROL_HEADERS)), CLIENTS)),
    st.booleans(),
)
def test_whatever_a_client_adds_the_gateway_s_value_counts_or_none(
    name: str, value: str, clients: list[tuple[str, str]], is_named: bool
) -> None:
    """Repeated headers come joined with commas, in either order."""
    [word] = [each for each in TRUSTABLE if name in names_of([each])]
    headers = {name: value}
    for added, what in clients:
        headers[added] = f"{what},{headers[added]}" if added in headers else what
    try:
        found = read_hints(headers, (name if is_named else word,))
    except RequestError:
        return  # 400, as above
    [field] = [field for field, *names in BOTH if name in names]
    assert str(getattr(found, field)).removesuffix(".0") == value


@pytest.mark.parametrize(("field", "name", "older"), BOTH)
def test_where_one_name_is_trusted_the_other_says_nothing(
    field: str, name: str, older: str
) -> None:
    for counts, ignored in ((name, older), (older, name)):
        found = read_hints({counts: "250", ignored: "7"}, (counts,))
        assert float(getattr(found, field)) == 250
        assert set(found.header_names) == {name, older}
        assert getattr(read_hints({ignored: "7"}, (counts,)), field) in ("", None)


@pytest.mark.parametrize(("field", "name", "older"), BOTH)
def test_an_empty_header_is_none_and_is_removed_all_the_same(
    field: str, name: str, older: str
) -> None:
    found = read_hints({name: " "})

    assert found == Hints(header_names=(name,))
    assert getattr(found, field) in ("", None)


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
    "value",
    [
        "fast",
        "-1",
        "0",
        "0.0",
        "1e13",
        "nan",
        "inf",
        "1,5",
        "0x10",
        "٣",
        "1" * 13,
        "1 2",
        "1e-13",
        "1e400",
        "1e",
        "e3",
        "+.",
        "1_0",
        "infinity",
        "1e3e3",
        "0e5",
        "1" * 33,
        "0." + "0" * 40 + "1",
    ],
)
def test_a_time_that_is_not_a_positive_number_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_hints({name: value})

    rejection = caught.value.rejection
    assert (rejection.status, rejection.reason) == (400, Reason.INVALID_HEADER)
    assert rejection.param == name
    assert value not in rejection.message


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("200", 200.0),
        ("0.5", 0.5),
        (" 7 ", 7.0),
        ("1e3", 1000.0),
        ("1.5E+2", 150.0),
        ("5e-1", 0.5),
        ("+1", 1.0),
        ("2.", 2.0),
        (".5", 0.5),
    ],
)
def test_a_time_is_written_as_go_writes_and_reads_numbers(value: str, expected: float) -> None:
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
