"""The definition of LLMRoutes in a real API server: it says what the routers say."""

from __future__ import annotations

from typing import Any

import pytest

from tests.adapters.declarable import BAD, BAD_FALLBACKS, GOOD, Fields
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.declared import ROUTES

pytestmark = [pytest.mark.usefixtures("definition"), pytest.mark.slow]


async def said_of(cluster: Cluster, fields: Fields, **spec: Any) -> str:
    """Return why the API server refuses an LLMRoute, "" if it takes it."""
    wanted = {
        "apiVersion": ROUTES,
        "kind": "LLMRoute",
        "metadata": {"generateName": "r-"},
        "spec": {"backendRefs": [{"name": "pool"}], "adapter": fields, **spec},
    }
    try:
        await cluster.request("POST", f"{ROUTES}//llmroutes", wanted)
    except AssertionError as error:
        return str(error)
    return ""


async def test_what_can_stand_is_taken(cluster: Cluster) -> None:
    refused = {str(each): await said_of(cluster, each) for each in GOOD}

    assert {each: why for each, why in refused.items() if why} == {}


async def test_what_cannot_stand_is_refused_for_the_reason_that_routers_have(
    cluster: Cluster,
) -> None:
    said = [(fields, why, await said_of(cluster, fields)) for fields, why, _ in BAD]
    schemas = [by_schema or why for _, why, by_schema in BAD]
    wrong = [each for each, why in zip(said, schemas, strict=True) if why not in each[2]]

    assert wrong == []


async def test_a_fallback_that_no_client_can_ask_for_is_refused(cluster: Cluster) -> None:
    said = [(why, await said_of(cluster, {"name": "a"}, fallback=it)) for it, why in BAD_FALLBACKS]

    assert [each for each in said if each[0] not in each[1]] == []
