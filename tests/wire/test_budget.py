"""One budget for all bodies: which uploads get room, wait, or are given up."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from extproc.wire.budget import GRANT_BYTES, MAX_WAIT_S, PATIENCE_S, Budget

MIB = 1024 * 1024


@dataclass(eq=False)
class Body:
    """An upload that records its calls."""

    budget: Budget
    held_bytes: int = 0
    waited_s: float = 0.0
    num_grants: int = 0
    is_given_up: bool = False

    def take(self, num_bytes: int) -> bool:
        """Add bytes; return whether more may come."""
        self.budget.add(self, num_bytes)
        return self.budget.may_grow(self)

    def grant(self) -> None:
        self.num_grants += 1

    def give_up(self) -> None:
        self.is_given_up = True


def bodies(budget: Budget, *sizes: int) -> list[Body]:
    """Return unfinished uploads of these sizes, oldest first."""
    found = [Body(budget) for _ in sizes]
    for each, size in zip(found, sizes, strict=True):
        budget.add(each, size)
    return found


def test_below_half_of_the_budget_everybody_may_grow() -> None:
    budget = Budget(100 * MIB, max_upload_bytes=20 * MIB)
    uploads = [Body(budget) for _ in range(49)]

    assert all(each.take(MIB) for each in uploads)


def test_above_half_as_many_of_the_oldest_may_as_fit_to_their_largest_size() -> None:
    budget = Budget(100 * MIB, max_upload_bytes=20 * MIB)
    uploads = bodies(budget, *[10 * MIB] * 6)

    assert [budget.may_grow(each) for each in uploads] == [True] * 4 + [False] * 2


def test_the_oldest_may_always_grow() -> None:
    budget = Budget(10 * MIB, max_upload_bytes=20 * MIB)
    first, second = bodies(budget, 6 * MIB, MIB)

    assert budget.may_grow(first)
    assert not budget.may_grow(second)


def test_who_holds_nothing_never_waits() -> None:
    budget = Budget(10 * MIB)
    bodies(budget, 9 * MIB)

    assert budget.may_grow(Body(budget))


def test_what_one_lets_go_lets_the_next_oldest_go_on() -> None:
    budget = Budget(100 * MIB, max_upload_bytes=60 * MIB)
    first, second, third = bodies(budget, 30 * MIB, 30 * MIB, 30 * MIB)
    assert [budget.may_grow(each) for each in (third, second)] == [False, False]
    budget.leave(first)

    assert (second.num_grants, third.num_grants) == (1, 0)


def test_above_half_a_waiting_upload_goes_on_once_all_fit_to_their_largest_size() -> None:
    budget = Budget(100 * MIB, max_upload_bytes=50 * MIB)
    first, second = bodies(budget, 60 * MIB, 30 * MIB)
    assert not budget.may_grow(second)
    budget.add(first, -20 * MIB)

    assert second.num_grants == 1


def test_below_half_again_all_who_waited_go_on_as_far_as_there_is_room() -> None:
    budget = Budget(16 * GRANT_BYTES, max_upload_bytes=16 * GRANT_BYTES)
    first, *others = bodies(budget, 7 * GRANT_BYTES, *[GRANT_BYTES] * 4)
    assert not any(budget.may_grow(each) for each in others)
    budget.leave(first)

    assert [each.num_grants for each in others] == [1, 1, 1, 1]


def test_who_waits_and_holds_nothing_any_more_goes_on() -> None:
    budget = Budget(10 * MIB, max_upload_bytes=10 * MIB)
    _, waiting = bodies(budget, 8 * MIB, MIB)
    assert not budget.may_grow(waiting)
    budget.add(waiting, -MIB)

    assert waiting.num_grants == 1
    assert budget.used_bytes == 8 * MIB


def test_unsent_answers_count_and_letting_them_go_makes_room() -> None:
    budget = Budget(10 * MIB, max_upload_bytes=MIB)
    first, second = bodies(budget, MIB, MIB)
    budget.add_unsent(8 * MIB)
    assert budget.unsent_bytes < budget.max_bytes
    assert budget.used_bytes <= budget.max_bytes
    budget.add_unsent(-1)
    assert budget.may_grow(second)
    budget.add_unsent(1)
    budget.add(first, -1)
    assert budget.may_grow(first)


def test_what_does_not_fit_is_given_up_oldest_unfinished_first() -> None:
    budget = Budget(10 * MIB)
    whole, old, young = bodies(budget, 4 * MIB, 4 * MIB, 4 * MIB)
    budget.set_whole(whole)
    budget.relieve()

    assert [each.is_given_up for each in (whole, old, young)] == [False, True, False]
    assert (budget.used_bytes, budget.num_given_up) == (8 * MIB, 1)


def test_whole_bodies_are_given_up_where_no_other_is_left() -> None:
    budget = Budget(10 * MIB)
    whole, other = bodies(budget, 6 * MIB, 6 * MIB)
    budget.set_whole(whole)
    budget.set_whole(other)
    budget.add(other, 1)
    budget.relieve()

    assert [whole.is_given_up, other.is_given_up] == [True, False]


def test_unsent_answers_alone_give_nobody_up() -> None:
    budget = Budget(10)
    budget.add_unsent(11)
    budget.relieve()

    assert budget.unsent_bytes >= budget.max_bytes
    assert budget.num_given_up == 0


def test_who_asks_again_while_it_waits_is_told_what_has_become_true() -> None:
    budget = Budget(10 * MIB, max_upload_bytes=10 * MIB)
    first, second = bodies(budget, 5 * MIB, MIB)
    assert not budget.may_grow(second)
    budget.tick(now=1.0)
    budget.set_whole(first)
    assert budget.may_grow(second)
    budget.leave(first)

    assert (second.num_grants, second.waited_s) == (0, 1.0)


def test_answers_that_have_been_sent_make_room() -> None:
    budget = Budget(10 * MIB, max_upload_bytes=10 * MIB)
    _, second = bodies(budget, MIB, MIB)
    budget.add_unsent(7 * MIB)
    assert not budget.may_grow(second)
    budget.add_unsent(-7 * MIB)

    assert second.num_grants == 1


def test_one_that_is_given_up_may_be_enough_for_several_that_wait() -> None:
    budget = Budget(16 * GRANT_BYTES, max_upload_bytes=16 * GRANT_BYTES)
    stuck, *waiting = bodies(budget, 12 * GRANT_BYTES, *[GRANT_BYTES] * 3)
    assert not any(budget.may_grow(each) for each in waiting)
    budget.tick(now=PATIENCE_S + 0.1)

    assert stuck.is_given_up
    assert [(each.num_grants, each.is_given_up) for each in waiting] == [(1, False)] * 3


def test_who_stands_still_while_others_wait_is_given_up() -> None:
    budget = Budget(10 * MIB, max_upload_bytes=10 * MIB)
    stuck, waiting, idle = bodies(budget, 5 * MIB, MIB, MIB)
    budget.tick(now=1.0)
    assert not budget.may_grow(waiting)
    budget.tick(now=1.0 + PATIENCE_S)
    assert budget.num_given_up == 0
    budget.tick(now=1.1 + PATIENCE_S)

    assert [stuck.is_given_up, waiting.is_given_up] == [True, False]
    assert waiting.num_grants == 1
    assert not idle.is_given_up, "nobody waits any more"


def test_who_moves_is_not_given_up_and_who_waits_too_long_is() -> None:
    budget = Budget(10 * MIB, max_upload_bytes=10 * MIB)
    moving, waiting = bodies(budget, 5 * MIB, MIB)
    assert not budget.may_grow(waiting)
    for now in range(int(MAX_WAIT_S) + 1):
        budget.tick(now=now)
        assert budget.may_grow(moving)
    [later] = bodies(budget, MIB)
    assert not budget.may_grow(later)
    assert budget.may_grow(moving)
    budget.tick(now=MAX_WAIT_S + 0.1)

    assert [each.is_given_up for each in (moving, waiting, later)] == [False, True, False]


def test_all_the_times_that_an_upload_waits_count_together() -> None:
    budget = Budget(10 * MIB, max_upload_bytes=10 * MIB)
    moving, waiting = bodies(budget, 5 * MIB, MIB)
    assert not budget.may_grow(waiting)
    for now in range(int(MAX_WAIT_S)):
        budget.tick(now=now)
        assert budget.may_grow(moving)
    budget.add(moving, -2 * MIB)
    assert waiting.num_grants == 1
    budget.add(moving, 2 * MIB)
    assert not budget.may_grow(waiting)
    budget.add(moving, -2 * MIB + 1)
    assert waiting.num_grants == 2
    budget.add(moving, 2 * MIB)
    assert not budget.may_grow(waiting)
    budget.tick(now=MAX_WAIT_S)
    assert budget.num_given_up == 0
    budget.tick(now=MAX_WAIT_S + 0.1)

    assert [moving.is_given_up, waiting.is_given_up] == [False, True]


@given(
    st.lists(
        st.tuples(st.integers(0, 7), st.sampled_from(["more", "less", "whole", "leave", "late"])),
        max_size=60,
    )
)
def test_the_sum_is_what_uploads_hold_and_never_above_the_budget(
    steps: list[tuple[int, str]],
) -> None:
    budget = Budget(20, max_upload_bytes=8)
    uploads = [Body(budget) for _ in range(8)]
    for number, (index, step) in enumerate(steps):
        upload = uploads[index]
        if step == "more" and not upload.is_given_up:
            upload.take(3)
        elif step == "less" and upload.held_bytes:
            budget.add(upload, -min(2, upload.held_bytes))
        elif step == "whole":
            budget.set_whole(upload)
        elif step == "leave":
            budget.leave(upload)
        elif step == "late":
            budget.tick(now=number * PATIENCE_S)
        budget.relieve()

        assert budget.used_bytes == sum(each.held_bytes for each in uploads) <= budget.max_bytes
        assert all(not each.held_bytes for each in uploads if each.is_given_up)
    for each in uploads:
        budget.leave(each)
    assert budget.used_bytes == 0
