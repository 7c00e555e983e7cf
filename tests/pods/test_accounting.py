"""How picks end: whom to believe, and what follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest
from msgspec.structs import replace

from extproc.costs import Costs
from extproc.learned.evidence import Evidence, StreamEnd
from extproc.peers.relay import Relay
from extproc.pods.accounting import UNANSWERED_S, Accounting, AccountingSettings, EndSource
from extproc.pods.completion import Ended
from extproc.pods.listeners import Nobody
from extproc.pods.pool import Pool, PoolSettings
from extproc.pods.serverflags import ServerFlags
from extproc.types import EndpointView, Outcome, RequestInfo
from tests.builders import address, completion, endpoint, fill, pick, report, request
from tests.otherrouters import OtherRouter

LOGS = (0, 1)
COMPLETED = StreamEnd(Outcome.COMPLETED)


class Settled(Nobody):
    """The output of requests that have ended, in tokens."""

    def __init__(self) -> None:
        self.tokens: list[float] = []

    def settle(self, request: RequestInfo, output_tokens: float) -> None:
        self.tokens.append(output_tokens)


class Books:
    """The accounting of the router `r` over two endpoints, with one pick under way."""

    def __init__(self, *, model: str = "a", relay: Relay | None = None, **settings: Any) -> None:
        self.pool = fill(Pool(), 1, 2, adapters="ab", load=report(max_loras=1))
        self.accounting = Accounting(self.pool, "r", AccountingSettings(**settings), relay)
        adapter = model or None
        info = request(adapter, model=model, request_id="request-1")
        self.pick = pick("r-1", 1, info=info)
        self.pool.flights.start(self.pick, now=1.0)

    def hear(self, **changes: Any) -> Ended | None:
        return self.accounting.complete(completion(**{"lag_s": 0.5, **changes}), now=3.0)

    def view(self, number: int = 1) -> EndpointView:
        return self.pool.snapshot(now=1.0).endpoints[number - 1]


@pytest.mark.parametrize(
    ("verdict", "took_s", "is_judged"),
    [
        (Evidence.SERVED, 1.0, False),
        (Evidence.BROKEN, 1.0, True),
        (Evidence.NONE, 9.0, False),
        (Evidence.UNANSWERED, UNANSWERED_S - 0.1, False),
        (Evidence.UNANSWERED, UNANSWERED_S, True),
    ],
)
def test_an_endpoint_is_judged_by_the_ends_that_streams_report(
    verdict: Evidence, took_s: float, is_judged: bool
) -> None:
    """A client that leaves soon, before any answer, tells nothing of the endpoint."""
    books = Books(source=EndSource.RESPONSE_PHASES)
    outliers = books.pool.outliers
    end = StreamEnd(Outcome.FAILED, verdict, num_bytes=9000)
    assert books.accounting.finish(books.pick, end, now=1.0 + took_s)

    assert (outliers._records[address(1)].num_row > 0) is is_judged


def test_a_pick_is_at_the_endpoint_that_it_was_moved_to() -> None:
    books = Books()
    accounting = books.accounting
    accounting.served(books.pick, address(2), now=1.0)
    ended = [accounting.finish(books.pick, COMPLETED, now=2.0) for _ in range(2)]

    assert ended[0] is not None
    assert ended[0].pod.address == address(2)
    assert ended[1] is None
    assert accounting.servers.num["other"] == 1


def test_an_endpoint_is_unreachable_while_the_last_call_could_not_connect() -> None:
    books = Books()
    accounting, pool = books.accounting, books.pool
    assert [accounting.is_unreachable(address(n)) for n in (1, 9)] == [False, False]
    pool.record_unreachable(address(1))
    assert accounting.is_unreachable(address(1))
    assert not pool.outliers.has_answered(address(1), since_s=5.0)
    pool.record_report(address(1), report(), taken_at_s=6.0, asked_at_s=5.5)

    assert not accounting.is_unreachable(address(1))
    assert pool.outliers.has_answered(address(1), since_s=5.0)
    assert not pool.outliers.has_answered(address(9), since_s=5.0)


def test_a_pick_counts_where_the_data_plane_says_that_it_is_served() -> None:
    books = Books()
    found = []
    for number in (1, 2):
        books.accounting.served(books.pick, address(number), now=1.0)
        found.append([books.view(each).num_in_flight for each in (1, 2)])

    assert found == [[1, 0], [0, 1]]
    assert books.accounting.servers.num["chosen"] == 1


# --- completions ------------------------------------------------------------------------------


def test_a_completion_ends_its_pick_once() -> None:
    books = Books()
    first, second = books.hear(), books.hear()

    assert first is not None
    assert first.pick.id == books.pick.id
    assert second is None
    assert books.accounting.is_ours(books.pick.id)
    assert len(books.pool.flights) == 0


def test_a_completion_that_has_lost_its_pick_is_found_by_its_request() -> None:
    books = Books()
    ended = books.hear(pick_id="", request_id="request-1")

    assert ended is not None
    assert ended.pick.id == books.pick.id


def test_an_entry_about_another_routers_pick_ends_nothing_here() -> None:
    """It is passed on to that router, which tells of the end."""
    books = Books()
    OtherRouter(books.pool, "other").start(now=1.0)
    ended = books.hear(pick_id="other-1")

    assert ended is None
    assert (books.view().num_told, books.view().num_in_flight) == (1, 1)


@pytest.mark.parametrize(("served", "resident_at"), [(address(1), 1), ("", 1), (address(2), 2)])
def test_an_adapter_is_resident_where_its_pick_was_served(served: str, resident_at: int) -> None:
    """If elsewhere, the pick's own endpoint refused it: its engine never saw the request."""
    books = Books()
    books.hear(address=served, attempts=2)

    assert [n for n in (1, 2) if books.view(n).gpu_adapters == ("a",)] == [resident_at]


def test_an_entry_that_comes_late_leaves_the_prompts_that_are_ahead_at_that_time() -> None:
    """Two prompts of a second each; one ended 2 s ago, as is known now."""
    books = Books(model="")
    for number in (2, 3):
        made = pick(f"r-{number}", 1, info=request(None, body_bytes=96_000))
        books.pool.flights.start(made, now=3.0)
    books.hear(pick_id="r-2", lag_s=2.0)  # heard at 3.0

    assert books.view().prompts_done_s == pytest.approx(3.0 + 1.0)


@pytest.mark.parametrize("pick_id", ["", "nonsense", "q-1", "rr-1"])
def test_what_another_router_picked_is_not_ours(pick_id: str) -> None:
    books = Books()

    assert books.hear(pick_id=pick_id) is None
    assert not books.accounting.is_ours(pick_id)
    assert len(books.pool.flights) == 1


def test_an_adapter_was_used_up_to_the_end_of_its_request_not_to_the_news_of_it() -> None:
    books = Books()
    later = pick("r-2", 1, info=request("b"))
    books.pool.flights.start(later, now=1.0)
    books.accounting.finish(later, COMPLETED, now=2.75)
    books.hear(lag_s=0.5)  # heard at 3.0

    assert books.view().gpu_adapters == ("b",)


@pytest.mark.parametrize(
    ("changes", "has_run"),
    [
        ({}, True),
        ({"status": 404}, False),
        ({"status": 400}, False),  # too long for the model, for instance
        ({"status": 429}, False),
        ({"status": 499, "outcome": Outcome.CANCELLED}, True),
        ({"status": 404, "outcome": Outcome.CANCELLED}, False),
        ({"status": 503, "outcome": Outcome.FAILED, "first_byte_s": None}, False),
        ({"status": 503, "outcome": Outcome.FAILED}, True),
        ({"status": 0, "outcome": Outcome.CANCELLED, "first_byte_s": None}, True),
    ],
)
def test_what_never_reached_the_engine_has_loaded_no_adapter(
    changes: dict[str, Any], has_run: bool
) -> None:
    books = Books()
    books.hear(**changes)

    assert (books.view().gpu_adapters == ("a",)) == has_run


@pytest.mark.parametrize(("told", "at"), [(address(2), 2), ("", 1)])
def test_a_load_report_in_an_answer_is_that_of_the_endpoint_that_answered(
    told: str, at: int
) -> None:
    books = Books()
    books.hear(address=told, orca="TEXT kv_cache_usage_perc=0.5, num_requests_waiting=7")

    assert [books.view(number).num_waiting for number in (1, 2)] == [7 * (at == 1), 7 * (at == 2)]


def test_a_load_report_that_cannot_be_read_changes_nothing() -> None:
    books = Books()

    assert books.hear(orca="TEXT nonsense") is not None
    assert books.view().num_waiting == 0


# --- whether to believe a 404 -----------------------------------------------------------------


def test_a_404_takes_no_model_off_the_list() -> None:
    books = Books()
    books.hear(status=404)

    assert books.view().has_registered("a")


# --- which source to trust --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "in_force"),
    [
        (EndSource.AUTO, {"access_log": 1, "pages": 0, "response": 0}),
        (EndSource.ACCESS_LOG, {"access_log": 1, "pages": 0, "response": 0}),
        (EndSource.RESPONSE_PHASES, {"access_log": 0, "pages": 0, "response": 1}),
        (EndSource.SCRAPE, {"access_log": 0, "pages": 1, "response": 0}),
    ],
)
def test_people_read_which_source_is_in_force(
    source: EndSource, in_force: Mapping[str, int]
) -> None:
    books = Books(source=source)
    books.hear()

    assert books.accounting.in_force(now=3.0) == in_force


def test_an_envoy_whose_log_is_lost_is_named_once_and_again_when_it_is_back() -> None:
    books = Books()
    books.hear()
    books.pool.flights.start(books.pick, now=4.0)
    looks = [books.accounting.check_logs(now=4.0)]
    books.accounting.logs.lost("", now=5.0)
    looks += [books.accounting.check_logs(now=5.0), books.accounting.check_logs(now=6.0)]
    books.hear()
    looks.append(books.accounting.check_logs(now=7.0))

    assert looks == [([], []), ([], [""]), ([], []), ([""], [])]
    assert Books(source=EndSource.SCRAPE).accounting.check_logs(now=1.0) == ([], [])


@pytest.mark.parametrize(
    ("source", "knows"),
    [
        (EndSource.AUTO, [False, True]),
        (EndSource.ACCESS_LOG, [False, True]),
        (EndSource.RESPONSE_PHASES, [False, False]),
        (EndSource.SCRAPE, [False, False]),
    ],
)
def test_times_are_known_from_an_access_log_that_is_trusted(
    source: EndSource, knows: Sequence[bool]
) -> None:
    accounting = Books(source=source).accounting
    seen = []
    for count in LOGS:
        accounting.record_access_logs(count)
        seen.append(accounting.knows_times())

    assert seen == knows


def test_an_access_log_that_another_router_passes_on_is_as_good_as_ones_own() -> None:
    relay = Relay()
    accounting = Books(relay=relay).accounting
    seen = [accounting.knows_times()]
    relay.open("other", lambda _batch: None, now=0.0).has_relayed = True
    seen.append(accounting.knows_times())

    assert seen == [False, True]


# --- other ends -------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", [Outcome.COMPLETED, Outcome.CANCELLED, Outcome.FAILED])
def test_a_stream_ends_its_pick_once_and_a_failed_one_has_loaded_nothing(outcome: Outcome) -> None:
    books = Books()
    seen = [books.accounting.finish(books.pick, StreamEnd(outcome), now=2.0) for _ in range(2)]

    assert [each is not None for each in seen] == [True, False]
    assert (books.view().gpu_adapters == ("a",)) == (outcome is not Outcome.FAILED)


def test_an_endpoint_that_has_less_to_do_than_we_sent_has_ended_it() -> None:
    books = Books(source=EndSource.SCRAPE, scrape_grace_s=0.5)
    ended = []
    for now in (1.4, 1.6):
        books.pool.record_report(address(1), report(), taken_at_s=now)
        ended.append([each.pick for each in books.accounting.reconcile(address(1), now=now)])

    assert ended == [[], [books.pick]]


def test_a_pick_that_nobody_tells_of_is_given_up() -> None:
    books = Books(max_age_s=5.0)

    assert books.accounting.expire(now=6.0) == []
    assert [each.pick for each in books.accounting.expire(now=6.1)] == [books.pick]


# --- first tokens -----------------------------------------------------------------------------


def heard(
    monkeypatch: pytest.MonkeyPatch,
    *,
    group: str = "",
    info: Mapping[str, Any] = MappingProxyType({}),
    **changes: Any,
) -> list[float]:
    """What is heard of the endpoint's time for a request that was held for half a second.

    Its endpoint comes into the group `group` meanwhile.
    """
    pool, told = Pool(PoolSettings(groups={"l4": ServerFlags()})), []
    monkeypatch.setattr(pool.speeds, "had_first_token", lambda *of: told.append(of[-1]))
    pool.set_endpoints([endpoint(1), endpoint(2)])
    pool.record_report(address(1), report(max_loras=1), taken_at_s=0.0)
    held = request("a", arrived_at_s=0.5, **info)
    pool.flights.start(pick("r-1", 1, info=held), now=1.0)
    pool.set_endpoints([replace(endpoint(1), group=group), endpoint(2)])
    times = {"first_body_byte_s": 0.75, "duration_s": 1.0}
    Accounting(pool, "r").complete(completion(**(times | changes)), now=3.0)
    return told


def test_a_streamed_response_tells_how_long_the_engine_took_for_its_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert heard(monkeypatch) == [0.25]


@pytest.mark.parametrize(
    "changes",
    [
        {"duration_s": 0.75},  # not streamed
        {"duration_s": None},
        {"first_body_byte_s": None},
        {"status": 500},
        {"attempts": 2},
        {"address": address(2)},
        {"shows_first_token": False},
        {"info": {"is_whole": False}},  # it may be longer than what was seen
        {"info": {"path": "/v1/responses"}},  # vLLM sends `response.created` at once
        {"info": {"path": "/v1/audio/transcriptions"}},
        {"group": "l4"},  # neither of the group that it was in nor of the one that it is in
    ],
)
def test_other_responses_tell_nothing_about_the_engine(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert heard(monkeypatch, **changes) == []


def learned_ratio(*, info: Mapping[str, Any] = MappingProxyType({}), **changes: Any) -> float:
    """What prompts are learned to cost, over what is configured.

    An endpoint takes four times as long for each byte as is configured; of two requests at once the
    second one is late.
    """
    pool = Pool()
    pool.set_endpoints([endpoint(1)])
    accounting, byte_s = Accounting(pool, "r"), Costs().prompt_s_per_byte
    for number in range(64):
        now, num_bytes = 10.0 * number, 1_000 + 1_000 * number
        prompt = request(None, arrived_at_s=now - 0.5, body_bytes=num_bytes, **info)
        first_s = 0.5 + 0.02 + 4 * byte_s * num_bytes
        pick_ids = f"r-{2 * number}", f"r-{2 * number + 1}"
        for pick_id in pick_ids:
            pool.flights.start(pick(pick_id, 1, info=prompt), now=now)
        for pick_id, late_s in zip(pick_ids, (0.0, 5.0), strict=True):
            times = {"first_body_byte_s": first_s + late_s, "duration_s": 9.0, "lag_s": 0.0}
            ended = completion(pick_id=pick_id, **(times | changes))
            accounting.complete(ended, now=now + 9.0)

    return pool.snapshot(now=700.0).endpoints[0].costs.prompt_s_per_byte / byte_s


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", ""])
def test_first_tokens_of_streamed_responses_teach_what_prompts_cost(path: str) -> None:
    assert learned_ratio(info={"path": path}) == pytest.approx(4.0, rel=0.01)


@pytest.mark.parametrize(
    "changes",
    [
        {"duration_s": None},
        {"shows_first_token": False},
        {"info": {"is_whole": False}},
        {"info": {"path": "/v1/responses"}},
        {"info": {"path": "/v1/audio/transcriptions"}},
    ],
)
def test_what_prompts_cost_is_not_learned_where_bytes_or_the_first_token_are_unknown(
    changes: dict[str, Any],
) -> None:
    assert learned_ratio(**changes) == 1.0


def watched(
    *, info: Mapping[str, Any] = MappingProxyType({}), reports: bool = True, **changes: Any
) -> tuple[Accounting, list[float]]:
    """Accounting after many streamed responses, and the tokens of which it told.

    The endpoint makes 4 requests' tokens in steps of 25 ms.
    """
    settled = Settled()
    pool, told = Pool(queue=settled), settled.tokens
    pool.set_endpoints([endpoint(1)])
    accounting = Accounting(pool, "r")
    for tick in range(400):
        now = 0.25 * tick
        if reports:
            loaded = report(num_running=4, generated_tokens=40 * tick)
            pool.record_report(address(1), loaded, taken_at_s=now)
        pool.flights.start(pick(f"r-{tick}", 1, info=request(**info)), now=now - 5.0)
        times = {"first_body_byte_s": 1.0, "duration_s": 5.0, "lag_s": 0.0}
        answer = {"body_bytes": 161 * 220} | times
        accounting.complete(completion(f"r-{tick}", **(answer | changes)), now=now)
    return accounting, told


def known_tpot_s(**changes: Any) -> float | None:
    """The mean time per output token of streamed responses, None where it is not known."""
    accounting, _ = watched(**changes)
    tpots = accounting.tpots
    num = tpots.num_responses.total()
    return tpots.seconds[""] / num if num else None


def test_streamed_bytes_tell_the_time_per_output_token() -> None:
    assert known_tpot_s() == pytest.approx(0.025, rel=0.02)


@pytest.mark.parametrize(
    "changes",
    [
        {"body_bytes": 0},
        {"duration_s": None},
        {"duration_s": 1.0},  # not streamed
        {"shows_first_token": False},
        {"status": 400},
        {"attempts": 2},
        {"address": address(2)},
        {"info": {"path": "/v1/responses"}},
        {"info": {"path": "/v1/embeddings"}},
    ],
)
def test_time_per_output_token_is_not_told_by_other_responses(changes: dict[str, Any]) -> None:
    assert known_tpot_s(**changes) is None


def test_what_a_streamed_response_has_of_tokens_is_told() -> None:
    """By its endpoint's reports, and by its bytes once it is known what a token takes."""
    _, told = watched()

    assert len(told) > 300
    assert told == pytest.approx([161] * len(told), rel=0.05)


@pytest.mark.parametrize(
    ("changes", "num_tokens"),
    [
        ({"first_body_byte_s": 5.0, "body_bytes": 4_000}, 1_000),  # not streamed
        ({"status": 503}, 0),
        ({"status": 0, "address": "", "outcome": Outcome.CANCELLED}, 0),  # before it was sent
        ({"status": 504, "verdict": Evidence.NONE, "is_from_endpoint": True}, 0),
    ],
)
def test_what_other_responses_have_of_tokens_is_told(
    changes: dict[str, Any], num_tokens: float
) -> None:
    assert set(watched(**changes)[1]) == {num_tokens}


GIVEN_UP: dict[str, Any] = {
    **{"status": 0, "outcome": Outcome.CANCELLED, "first_byte_s": None},
    **{"first_body_byte_s": None, "body_bytes": 0, "verdict": Evidence.NONE},
}


@pytest.mark.parametrize(
    ("changes", "num_tokens"),
    [
        (GIVEN_UP, 200),
        (GIVEN_UP | {"info": {"path": "/v1/chat/completions/batch", "num_sequences": 3}}, 600),
        (GIVEN_UP | {"info": {"max_tokens": 10}}, 10),
        (GIVEN_UP | {"info": {"max_tokens": 10, "num_sequences": 30}}, 300),
        (GIVEN_UP | {"info": {"max_tokens": -1}}, 1),
        (GIVEN_UP | {"status": 200}, 200),  # a stream, before its first token
        (GIVEN_UP | {"status": 499}, 200),
        (GIVEN_UP | {"status": 504, "outcome": Outcome.FAILED, "is_from_endpoint": False}, 200),
        ({"info": {"path": "/v1/responses"}}, 200),
    ],
)
def test_a_response_that_nobody_saw_has_the_tokens_of_those_that_ran_as_long(
    changes: dict[str, Any], num_tokens: float
) -> None:
    told = watched(**changes)[1][100:]  # the first ones are older than the reports

    assert told == pytest.approx([num_tokens] * len(told), rel=0.05)


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        (GIVEN_UP, 102.0),
        ({"first_body_byte_s": 2.0, "duration_s": 102.0, "body_bytes": 900_000}, 100.0),
    ],
)
def test_a_response_that_is_older_than_what_is_remembered_has_tokens_by_their_time(
    changes: dict[str, Any], seconds: float
) -> None:
    settled = Settled()
    pool = Pool(queue=settled)
    pool.set_endpoints([endpoint(1)])
    accounting = Accounting(pool, "r")
    pool.flights.start(pick("r-0", 1), now=0.0)
    for tick in range(1, 5):
        loaded = report(num_running=4, generated_tokens=80 * tick)
        pool.record_report(address(1), loaded, taken_at_s=100.0 + 0.5 * tick)
    accounting.complete(completion("r-0", lag_s=0.0, **changes), now=102.0)

    assert settled.tokens == [pytest.approx(seconds / 0.025, rel=1e-3)]


def test_a_response_of_several_sequences_has_the_tokens_of_all_and_teaches_nothing_of_one() -> None:
    accounting, told = watched(info={"num_sequences": 3})

    assert told[-1] == pytest.approx(3 * 161, rel=0.05)
    assert not accounting.tpots.sizes


@pytest.mark.parametrize(
    "changes",
    [
        {"duration_s": None},
        {"first_body_byte_s": None},
        {"shows_first_token": False},
        {"reports": False},  # and bytes say nothing before reports taught what a token takes
        {"attempts": 2},
        {"info": {"path": "/v1/embeddings"}, "first_body_byte_s": 5.0},
        {"reports": False, "status": 0, "first_body_byte_s": None, "outcome": Outcome.CANCELLED},
    ],
)
def test_what_is_not_known_of_a_response_s_tokens_is_not_told(changes: dict[str, Any]) -> None:
    assert watched(**changes)[1] == []
