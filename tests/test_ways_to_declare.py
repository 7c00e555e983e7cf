"""An adapter can be declared in every way or in none, and each says the same of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from extproc.adapters.declared import Declaration
from extproc.adapters.stores.content import decode, decode_asked
from extproc.config.adapters import AdaptersConfig
from extproc.config.routes import RouteConfig
from extproc.discovery.kubernetes.llmroutes import routes_of
from extproc.discovery.kubernetes.objects import routes_query
from tests.adapters.declarable import BAD, BAD_FALLBACKS, GOOD, Fields
from tests.discovery.kubernetes.declared import POOL, POOLS, item, listed

TEXTS = st.text(max_size=6) | st.text("/.@:-_ah*, \x00\u00a0\u2028", max_size=12)
FIELDS = st.fixed_dictionaries(
    {"name": TEXTS},
    optional={
        "source": TEXTS | TEXTS.map("/{}".format) | TEXTS.map("hf:o/r{}".format),
        "version": TEXTS,
        "base": TEXTS,
        "rank": st.none() | st.integers(-1, 600),
        "replicas": st.fixed_dictionaries(
            {}, optional={"min": st.integers(-1, 1100), "max": st.none() | st.integers(-1, 1100)}
        ),
        "load": st.sampled_from(["auto", "eager", "lazy", "never"]),
    },
)


def of_a_client(fields: Fields) -> Declaration:
    return decode_asked(json.dumps(fields).encode())


def of_a_store(fields: Fields) -> Declaration:
    return decode(json.dumps(fields).encode()).declaration


def of_a_configuration(fields: Fields) -> Declaration:
    rest = {key: value for key, value in fields.items() if key != "name"}
    route = RouteConfig.model_validate({"name": "r", "models": [fields["name"]], "adapter": rest})
    assert route.adapter is not None
    return route.adapter.declaration(route.models[0])


def of_a_list(fields: Fields) -> Declaration:
    (declared,) = AdaptersConfig.model_validate({"declared": [fields]}).declared
    return declared.declaration(declared.name)


def of_an_llmroute(fields: Fields, **spec: Any) -> Declaration:
    found = item({"backendRefs": [POOL], "adapter": fields, **spec})
    declared = routes_of(POOLS, engine="vllm")
    (reading,) = declared.read(listed(routes_query(keeper=declared), found))
    if reading.declared is None:
        raise ValueError(reading.problem)
    return reading.declared.declaration


WAYS: list[Callable[[Fields], Declaration]] = [
    of_a_client,
    of_a_store,
    of_a_configuration,
    of_a_list,
    of_an_llmroute,
]


def accepted(fields: Fields) -> list[Declaration]:
    """What those declare who accept it."""
    found = []
    for way in WAYS:
        with suppress(ValueError):
            found.append(replace(way(fields), origin=""))
    return found


@given(FIELDS)
def test_a_declaration_is_accepted_in_every_way_or_in_none(fields: dict[str, Any]) -> None:
    found = accepted(fields)

    assert len(found) in (0, len(WAYS))
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("fields", GOOD, ids=str)
def test_what_can_stand_is_accepted_in_every_way(fields: Fields) -> None:
    assert len(accepted(fields)) == len(WAYS)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("fields", "why", "by_schema"), BAD, ids=str)
def test_what_cannot_stand_is_refused_in_every_way_and_for_the_same_reason(
    way: Any, fields: Fields, why: str, by_schema: str
) -> None:
    with pytest.raises(ValueError, match=r"\S") as refused:
        way(fields)

    said = str(refused.value)
    assert why in said or (by_schema and by_schema in said)


@pytest.mark.parametrize(("fallback", "why"), BAD_FALLBACKS)
def test_a_fallback_is_a_model_that_can_be_asked_for(fallback: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        of_an_llmroute({"name": "a"}, fallback=fallback)
