"""The ids of picks."""

from __future__ import annotations

from extproc.fleet.peerpicks import number_of, pick_id_of, pick_ids, router_of


def test_ids_differ_and_name_their_router() -> None:
    next_id = pick_ids("ab-12")
    ids = [next_id() for _ in range(3)]

    assert len(set(ids)) == 3
    assert {router_of(each) for each in ids} == {"ab-12"}


def test_what_is_no_id_of_a_pick_names_no_router() -> None:
    assert [router_of(each) for each in ("", "nonsense", "-1")] == ["", "", ""]


def test_an_id_is_its_router_and_a_number() -> None:
    next_id = pick_ids("ab-12")
    ids = [next_id() for _ in range(12)]

    assert [pick_id_of("ab-12", number_of(each)) for each in ids] == ids
