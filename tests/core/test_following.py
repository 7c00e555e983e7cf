"""Questions to the router that leads, and how each of them ends."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.core import following as f
from extproc.core.following import Answer
from extproc.core.policies import LeastHarm
from extproc.core.prices import chosen_terms
from extproc.core.types import Pick, Rejection
from tests.builders import address, report
from tests.core.team import NUM_PODS, TIMEOUT_S, Client, Team


def leader_and_follower(**fields: float) -> tuple[Team, f.Following]:
    team = Team(**fields)  # type: ignore[arg-type]
    return team, team.members["bb"].following


def picked(client: Client) -> Pick:
    assert isinstance(client.result, Pick)
    return client.result


def outcomes(following: f.Following) -> dict[str, int]:
    return {outcome: num for outcome, num in following.num_asked.items() if num}


def test_the_leader_chooses_and_both_count_the_pick_once_at_all_times() -> None:
    team, following = leader_and_follower()
    leader, follower = team.members["aa"], team.members["bb"]
    for _ in range(2):
        leader.request()  # on the first two pods; the follower is not told yet

    client = follower.request()
    counted = []
    while client.result is None:
        team.deliver("bb", "aa")
        counted.append(leader.told())
        team.deliver("aa", "bb", 5)
        if client.is_woken:
            follower.route(client)
    counted.append(leader.told())
    team.run()
    counted.append(leader.told())

    chosen = picked(client)
    assert chosen.id.startswith("bb-")
    assert (chosen.reason, chosen.leader) == ("asked", "aa")
    free = {address(n + 1) for n in range(NUM_PODS)}
    assert chosen.address in free - {picked(each).address for each in leader.clients}
    assert counted == [1, 1, 1]
    assert len(follower.pool.flights) == 1
    assert outcomes(following) == {f.ANSWERED: 1}
    follower.end(client)
    team.run()
    assert leader.told() == 0


def test_the_one_that_leads_asks_nobody() -> None:
    team, _ = leader_and_follower()
    leader = team.members["aa"]

    client = leader.request()

    assert picked(client).leader == ""
    assert outcomes(leader.following) == {}


def test_a_follower_without_an_answer_in_time_decides_alone_and_the_leader_forgets_it() -> None:
    team, following = leader_and_follower()
    leader, follower = team.members["aa"], team.members["bb"]

    client = follower.request()
    team.pass_time(TIMEOUT_S)
    alone = client.result
    team.run()

    assert isinstance(alone, Pick)
    assert alone.leader == ""
    assert outcomes(following) == {f.TIMEOUT: 1}
    assert leader.told() == 1
    follower.end(client)
    team.run()
    assert leader.told() == 0


def test_a_leader_that_goes_leaves_its_questions_to_the_askers() -> None:
    team, following = leader_and_follower()
    follower = team.members["bb"]

    client = follower.request()
    team.part("aa", "bb")
    team.run()

    assert picked(client).leader == ""
    assert outcomes(following) == {f.LOST: 1}


def test_a_client_that_leaves_takes_its_question_with_it() -> None:
    team, following = leader_and_follower()
    leader, follower = team.members["aa"], team.members["bb"]

    client = follower.request()
    team.deliver("bb", "aa")
    assert leader.told() == 1
    follower.leave(client)
    team.run()

    assert leader.told() == 0
    assert outcomes(following) == {f.WITHDRAWN: 1}
    assert following.num_open == 0


def test_an_answer_that_came_too_late_for_its_client_is_withdrawn() -> None:
    team, following = leader_and_follower()
    leader, follower = team.members["aa"], team.members["bb"]

    client = follower.request()
    team.deliver("bb", "aa")
    team.deliver("aa", "bb")
    follower.leave(client)
    team.run()

    assert leader.told() == 0
    assert outcomes(following) == {f.ANSWERED: 1}


def test_a_pod_that_the_follower_does_not_list_is_never_taken() -> None:
    team, following = leader_and_follower()
    leader, follower = team.members["aa"], team.members["bb"]
    client = follower.request()
    pick_id = next(iter(following._open))

    following.hear("aa", Answer(pick_id, "10.9.9.9:8000"), now=team.now)
    follower.route(client)

    assert picked(client).leader == ""
    assert picked(client).id != pick_id
    team.run()
    assert leader.told() == 1


def test_a_decline_is_followed_by_a_decision_alone() -> None:
    team, following = leader_and_follower()
    team.members["aa"].pool.set_endpoints([])

    client = team.members["bb"].request()
    team.run()

    assert picked(client).leader == ""
    assert outcomes(following) == {f.DECLINED: 1}


def test_beyond_the_limit_of_open_questions_a_follower_decides_alone() -> None:
    team, following = leader_and_follower(max_asked=2)
    follower = team.members["bb"]

    clients = [follower.request() for _ in range(3)]

    assert [client.result is None for client in clients] == [True, True, False]
    assert outcomes(following) == {f.FULL: 1}


def test_a_leader_that_cannot_be_sent_anything_is_not_waited_for() -> None:
    team, following = leader_and_follower()
    follower = team.members["bb"]
    team.part("aa", "bb")
    follower.before = "aa"  # the link's end has not been noticed

    client = follower.request()

    assert picked(client).leader == ""
    assert outcomes(following) == {f.FULL: 1}


def test_a_silent_leader_costs_a_few_timeouts_and_is_tried_now_and_then() -> None:
    team, following = leader_and_follower()
    follower, bounds = team.members["bb"], f.FollowingSettings()
    for _ in range(10):
        follower.request()
        team.pass_time(TIMEOUT_S)

    assert outcomes(following) == {f.TIMEOUT: 3, f.SILENT: 7}
    team.now += bounds.pause_s
    for _ in range(3):  # one of them asks
        follower.request()
    assert following.num_open == 1
    assert following.num_asked[f.SILENT] == 9
    team.run()
    client = follower.request()
    team.run()

    assert picked(client).leader == "aa"


def test_another_leader_is_asked_although_the_first_one_was_silent() -> None:
    team, following = leader_and_follower()
    follower = team.members["bb"]
    for _ in range(3):
        follower.request()
        team.pass_time(TIMEOUT_S)
    team.ways["bb", "a"] = team.ways["bb", "aa"].copy()
    follower.before = "a"

    follower.request()
    assert following.num_open == 1
    team.pass_time(TIMEOUT_S)
    follower.request()

    assert following.num_open == 1


def test_a_follower_that_stood_still_itself_does_not_blame_the_leader() -> None:
    team, following = leader_and_follower()
    for _ in range(5):
        team.members["bb"].request()
        team.pass_time(1.0 - TIMEOUT_S)

    assert outcomes(following) == {f.TIMEOUT: 5}


def test_a_held_request_waits_for_the_leader_as_long_as_it_gives_signs() -> None:
    team, following = leader_and_follower(max_hold_s=10.0)
    leader, follower = team.members["aa"], team.members["bb"]
    leader.policy.is_open = False

    client = follower.request("/held")
    for _ in range(100):
        team.run()
        team.pass_time(0.01)
    waiting = client.result
    leader.policy.is_open = True
    for _ in range(10):
        team.pass_time(0.01)
        team.run()

    assert waiting is None
    assert picked(client).leader == "aa"
    assert outcomes(following) == {f.ANSWERED: 1}


def test_a_leader_that_falls_silent_while_it_holds_is_waited_for_no_longer() -> None:
    team, following = leader_and_follower(max_hold_s=60.0)
    team.members["aa"].policy.is_open = False

    client = team.members["bb"].request("/held")
    team.run()
    for _ in range(100):
        team.now += 0.01
        team.members["bb"].route(client)

    assert picked(client).leader == ""
    assert outcomes(following) == {f.TIMEOUT: 1}


def test_at_the_end_of_its_own_hold_a_follower_decides_instead_of_rejecting() -> None:
    team, following = leader_and_follower(max_hold_s=0.3)
    leader = team.members["aa"]
    leader.policy.is_open, leader.router.max_hold_s = False, 60.0

    client = team.members["bb"].request("/held")
    while client.result is None:
        team.run()
        team.pass_time(0.01)

    assert picked(client).leader == ""
    assert following.num_open == 0


def test_a_leader_that_holds_for_as_long_as_it_may_is_not_silent() -> None:
    team, following = leader_and_follower(max_hold_s=0.3)
    leader, follower = team.members["aa"], team.members["bb"]
    leader.policy.is_open, leader.router.max_hold_s = False, 60.0

    clients = [follower.request("/held") for _ in range(9)]
    for _ in range(40):
        team.run()
        team.pass_time(0.01)

    assert {picked(each).leader for each in clients} == {""}
    assert outcomes(following) == {f.TIMEOUT: 9}
    follower.request()
    assert following.num_open == 1


def test_a_request_whose_body_took_longer_than_any_hold_is_asked_about_like_others() -> None:
    team, following = leader_and_follower(max_hold_s=0.3)
    client = team.members["bb"].request(arrived_at_s=team.now - 9)
    team.run()

    assert picked(client).leader == "aa"
    assert outcomes(following) == {f.ANSWERED: 1}


def test_what_a_silent_leader_holds_does_not_wait_for_the_end_of_its_time() -> None:
    team, following = leader_and_follower(max_hold_s=60.0)
    follower = team.members["bb"]
    team.members["aa"].policy.is_open = False
    held = follower.request("/held")
    team.run()
    for _ in range(3):
        follower.request()
    team.now += TIMEOUT_S
    for client in follower.clients[1:]:
        follower.route(client)

    assert held.is_woken
    assert outcomes(following) == {f.TIMEOUT: 4}


def test_answers_that_nobody_asked_for_and_second_answers_change_nothing() -> None:
    team, following = leader_and_follower()
    follower = team.members["bb"]
    client = follower.request()
    team.run()
    before = follower.pool.snapshot(now=team.now)

    for answer in (Answer(picked(client).id, address(1)), Answer("bb-99", address(2)), Answer("x")):
        following.hear("aa", answer, now=team.now)
        following.hear("cc", answer, now=team.now)
    team.run()

    assert follower.pool.snapshot(now=team.now) == before
    assert outcomes(following) == {f.ANSWERED: 1}


def test_a_session_that_this_router_knows_needs_no_question() -> None:
    team, following = leader_and_follower()
    follower = team.members["bb"]
    first = follower.request(session="s")
    meanwhile = follower.request(session="s")
    team.deliver("bb", "aa")
    team.deliver("aa", "bb")
    follower.route(first)
    follower.route(meanwhile)
    later = follower.request(session="s")
    team.run()

    assert {picked(each).address for each in (first, meanwhile, later)} == {picked(first).address}
    assert outcomes(following) == {f.ANSWERED: 1, f.WITHDRAWN: 1}
    assert team.members["aa"].told() == 3


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ("request", "held", "deliver", "time", "leave", "end", "cut", "open", "wake")
        ),
        st.integers(0, 5),
    ),
    min_size=10,
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(ACTIONS)
def test_whatever_happens_each_request_has_one_outcome_and_all_counts_end_at_nothing(
    actions: list[tuple[str, int]],
) -> None:
    """Three routers; messages, cuts, clients that leave and time in any order."""
    team = Team(3)
    members = list(team.members.values())
    for action, number in actions:
        act(team, action, number)
    for link in list(team.cut):
        team.join(*sorted(link))
    for member in members:
        member.policy.is_open = True
    for _ in range(200):
        team.run()
        team.pass_time(0.01)
    team.run()

    # All told: each router counts each pick of the others exactly once.
    total = sum(len(member.pool.flights) for member in members)
    for member in members:
        assert member.told() == total - len(member.pool.flights)
        assert member.following.num_open == member.leading.num_held == len(member.router.queue) == 0
        for client in member.clients:
            assert client.is_gone or isinstance(client.result, Pick | Rejection)
        ends = outcomes(member.following)
        assert sum(ends.values()) - ends.get(f.SILENT, 0) == team.num_questions[member.id]
        assert team.num_questions[member.id] <= len(member.clients)
        for client in member.clients:
            member.end(client)
    team.run()
    assert [member.told() for member in members] == [0, 0, 0]
    for member in members:
        for number in member.pods:  # what was cut off counted on until now
            member.pool.record_report(address(number), report(), taken_at_s=team.now)
        views = member.pool.snapshot(now=team.now).endpoints
        assert [(view.num_told, view.pending("a")) for view in views] == [(0, 0)] * NUM_PODS


def act(team: Team, action: str, number: int) -> None:
    members = list(team.members.values())
    member = members[number % 3]
    clients = member.clients
    client = clients[number % len(clients)] if clients else None
    if action == "request":
        member.request()
    elif action == "held":
        member.request("/held")
    elif action == "open":
        member.policy.is_open = not member.policy.is_open
    elif action == "time":
        team.pass_time(0.005 * number)
    elif action == "deliver":
        ways = list(team.ways)
        if ways:
            team.deliver(*ways[number % len(ways)], 3)
    elif action == "wake":
        for each in clients:
            if each.is_woken:
                member.route(each)
    elif action == "leave" and client is not None and client.result is None:
        member.leave(client)
    elif action == "end" and client is not None:
        member.end(client)
    elif action == "cut":
        one, other = sorted({"aa", "bb", "cc"} - {member.id})
        if frozenset((one, other)) in team.cut:
            team.join(one, other)
        else:
            team.part(one, other)


def test_a_pick_that_the_leader_chose_has_the_prices_of_this_routers_own_policy() -> None:
    team, _ = leader_and_follower()
    follower = team.members["bb"]
    follower.router.picker.configure(LeastHarm(), "least_harm")

    client = follower.request(body_bytes=1000)
    team.run()

    assert picked(client).leader == "aa"
    assert chosen_terms(picked(client)).keys() == {"own_prompt"}


@pytest.mark.parametrize("num", [1, 2, 4])
def test_a_name_of_the_leader_is_told_with_the_pick(num: int) -> None:
    team = Team(num)

    clients = [member.request() for member in team.members.values()]
    team.run()

    assert [picked(each).leader for each in clients] == ["", *["aa"] * (num - 1)]
