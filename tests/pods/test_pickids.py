"""The ids of picks."""

from __future__ import annotations

from extproc.pods.peerpicks import pick_ids, router_of


def test_ids_differ_and_name_their_router() -> None:
    next_id = pick_ids("ab-12")
    ids = [next_id() for _ in range(3)]

    assert len(set(ids)) == 3
    assert {router_of(each) for each in ids} == {"ab-12"}


def test_what_is_no_id_of_a_pick_names_no_router() -> None:
    assert [router_of(each) for each in ("", "nonsense", "-1")] == ["", "", ""]
