"""Why a model's first tokens come late, from what a router tells of itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from extproc.observe.why import Facts, answer

AT_S = 1000.0
PODS = ("10.0.0.1:80", "10.0.0.2:80")


def candidate(address: str, **fields: Any) -> dict[str, Any]:
    name = f"pod-{address[7]}"
    return {"address": address, "name": name, "num_pending": 2, "loaded": True, **fields}


def picked(
    *,
    first_s: float | None = 0.1,
    pods: Sequence[str] = PODS,
    served_by: str = "",
    held: tuple[float, str] | None = None,
    candidate_fields: dict[str, Any] | None = None,
    ends: bool = True,
    **fields: Any,
) -> dict[str, Any]:
    """A decision for `m` but for its time."""
    pick = {
        "id": "p",
        "request_id": "r",
        "model": "m",
        "adapter": "m",
        "served_model": "",
        "body_bytes": 500,
        "policy": "least_harm",
        "endpoints": [pods[0]],
        "held_seconds": held and held[0],
        "held_for": held[1] if held else "",
        "candidates": [candidate(each, **(candidate_fields or {})) for each in pods],
        **fields,
    }
    end = {"ttft_seconds": first_s, "duration_seconds": None, "served_by": served_by}
    return {"pick": pick, "outcome": end if ends else None}


def refused(model: str = "m") -> dict[str, Any]:
    return {"rejection": {"model": model, "status": 429, "reason": "saturated"}}


def pod(address: str, **fields: Any) -> dict[str, Any]:
    flags = dict.fromkeys(("unreachable", "silent", "ejected", "asleep", "full"), False)
    own = {"address": address, "name": "", "ready": True, "registered": ["m"]}
    return own | flags | fields


def said(
    before: Sequence[dict[str, Any]],
    now: Sequence[dict[str, Any]],
    *,
    since_s: float | None = AT_S,
    model: str = "m",
    **facts: Any,
) -> list[str]:
    """What is said of these decisions, a second between two of them, `now` from `AT_S` on."""
    absent = dict.fromkeys(("pick", "rejection", "outcome"))
    decisions = [
        (wall_s, absent | each)
        for wall_s, each in enumerate([*before, *now], start=int(AT_S) - len(before))
    ]
    pods = [pod(each) for each in PODS]
    return answer(
        Facts(decisions[::-1], **({"pods": pods} | facts)),
        model,
        since_s,
        lambda wall_s: f"{wall_s:.0f}",
    )


def cause(before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]], **more: Any) -> str:
    (line,) = (each for each in said(before, now, **more) if each.startswith("Cause: "))
    return line.removeprefix("Cause: ")


WELL = [picked()] * 10


def late(**fields: Any) -> list[dict[str, Any]]:
    return [picked(**({"first_s": 0.5} | fields))] * 10


def test_figures_stand_side_by_side_and_the_latest_request_can_be_followed() -> None:
    now = [*late(held=(0.4, "slot"))[1:], picked(first_s=2.0, request_id="the-latest"), refused()]

    lines = said(WELL, now)

    assert lines[0] == "m, since 1000; the router keeps decisions since 990"
    assert [line.split() for line in lines[1:7]] == [
        "first token 500 ms, p95 500 ms of 10 (before: 100 ms, p95 100 ms of 10)".split(),
        "held 9 of 10 (before: 0 of 10)".split(),
        "refused 429 saturated 1 (before: none)".split(),
        "adapter not loaded 0 of 10 (before: 0 of 10)".split(),
        "pending there 2 (before: 2)".split(),
        "pods pod-1 10 (before: pod-1 10)".split(),
    ]
    assert lines[7] == (
        "Cause: they wait in the queue: 9 of 10, the median held 400 ms for a slot."
    )
    assert lines[8] == ("The latest, after 2.00 s: extproc watch HOST:PORT --request the-latest")


@pytest.mark.parametrize(
    ("now", "facts", "expected"),
    [
        ([*WELL, *[refused()] * 10], {}, "10 of 20 are refused: 429 saturated 10."),
        (WELL, {}, "none to be seen; its first tokens come as they did before."),
        (late(), {}, "none to be seen in what the router keeps."),
        (
            late(candidate_fields={"loaded": False}),
            {},
            "the adapter was not loaded on the pod for 10 of 10.",
        ),
        (
            late(served_by=PODS[1]),
            {"slow": frozenset(PODS)},
            "pod-2, which served 10 of 10, is slower than its peers.",
        ),
        ([*late(), picked(served_by=PODS[1])], {"slow": frozenset(PODS[1:])}, None),
        (
            late(body_bytes=90_000),
            {},
            "the requests are longer: 90000 bytes, before 500.",
        ),
        (
            late(policy="random"),
            {},
            "the policy is another: random, before least_harm.",
        ),
        (
            late(candidate_fields={"num_pending": 9}),
            {},
            "the pod that is chosen has more to do: 9 requests, before 2.",
        ),
        (
            [*late(candidate_fields={"num_pending": 9}), *[picked(model="n", adapter="n")] * 10],
            {},
            "the pod that is chosen has more to do: 9 requests, before 2; the share of n of all "
            "requests is 50%, before 0%.",
        ),
    ],
)
def test_what_has_grown_is_the_cause(
    now: list[dict[str, Any]], facts: dict[str, Any], expected: str | None
) -> None:
    found = cause(WELL, now, **facts)

    assert found == (expected or "none to be seen in what the router keeps.")


def test_a_tenant_that_asks_for_more_itself_is_told_so() -> None:
    other = [picked(model="n", adapter="n")] * 40

    found = cause([*WELL, *other], late(candidate_fields={"num_pending": 9}))

    assert found.endswith("; its own share of all requests is 100%, before 20%.")


@pytest.mark.parametrize(
    ("pods", "state"),
    [
        ([], "discovery does not list it"),
        ([pod(PODS[1], unreachable=True, silent=True, ready=False)], "it refuses connections"),
        ([pod(PODS[1], silent=True)], "it does not answer"),
        ([pod(PODS[1], ejected=True)], "it is ejected, as requests fail there"),
        ([pod(PODS[1], asleep=True)], "its engine sleeps"),
        ([pod(PODS[1], full=True)], "it says that it is full"),
        ([pod(PODS[1], ready=False)], "it is not ready"),
        ([pod(PODS[1], registered=["n"])], "it does not list m"),
        ([pod(PODS[1], registered=None)], "it is well, and others are preferred"),
        ([pod(PODS[1])], "it is well, and others are preferred"),
    ],
)
def test_a_pod_that_takes_none_any_more_is_the_cause_with_its_state(
    pods: list[dict[str, Any]], state: str
) -> None:
    now = late(pods=PODS[:1], candidate_fields={"num_pending": 9})

    lines = said(WELL, now, pods=pods)

    assert f"Cause: pod-2 takes none of them any more: {state}." in lines
    assert "Also: the pod that is chosen has more to do: 9 requests, before 2." in lines


def test_without_a_time_what_is_kept_is_halved() -> None:
    assert cause(WELL, late(policy="random"), since_s=None).startswith("the policy is another")


def test_what_has_no_first_token_is_judged_by_its_end_and_what_runs_not_at_all() -> None:
    ended = picked(first_s=None)
    ended["outcome"]["duration_seconds"] = 3.0

    lines = said([picked(ends=False)], [ended, picked(ends=False)])

    assert lines[1].split() == "first token 3.00 s, p95 3.00 s of 1 (before: unknown)".split()


def test_where_nothing_is_kept_from_before_it_says_where_to_ask() -> None:
    lines = said([], late(held=(0.4, "slot")), since_s=AT_S)

    assert any("Nothing is kept of it before" in each for each in lines)
    assert any(each.startswith("Cause: they wait in the queue") for each in lines)


def test_where_nothing_has_come_since_there_is_no_cause() -> None:
    later_s = AT_S + 100

    assert cause(WELL, WELL, since_s=later_s) == "no request for it since then."


def test_a_model_that_nobody_asked_for_is_told_with_the_pods_that_list_it() -> None:
    assert said(WELL, [refused("n")], model="x", warnings=["a source is lost"]) == [
        "x: none of the 11 decisions kept is about it; listed by no pod.",
        "/healthz: a source is lost",
    ]
    there = [pod(PODS[0], name="pod-1", registered=["x"]), pod(PODS[1], registered=None)]
    (line,) = said(WELL, [], model="x", pods=there)
    assert line.endswith("is about it; listed by pod-1.")


def test_an_alias_is_found_by_the_name_that_the_pod_reads() -> None:
    (line, *_) = said([], [picked(model="alias", served_model="m")])

    assert line.startswith("m, since")


@pytest.mark.parametrize(
    ("changed_wall_s", "is_told"), [(AT_S + 1, True), (AT_S - 4, False), (0.0, False)]
)
def test_a_change_of_the_configuration_is_told_where_decisions_since_are_kept(
    changed_wall_s: float, is_told: bool
) -> None:
    lines = said([picked()] * 3, [picked()] * 3, changed_wall_s=changed_wall_s)

    told = [line for line in lines if "configuration" in line]
    assert told == [f"Also: the configuration changed at {changed_wall_s:.0f}."] * is_told
