"""Structured logs."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.observe.logs import MAX_REPEATS, RepeatLimit, configure_logging

LOGGER = logging.getLogger("extproc.test")


@pytest.fixture(autouse=True)
def _root_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


@pytest.fixture(params=[True, False], ids=["json", "plain"])
def lines(request: pytest.FixtureRequest) -> io.StringIO:
    stream = io.StringIO()
    configure_logging("info", is_json=request.param, stream=stream)
    return stream


def test_a_json_line_has_time_level_logger_message_and_extra_fields() -> None:
    stream = io.StringIO()
    configure_logging("INFO", is_json=True, stream=stream)
    LOGGER.warning("scrape of %s failed", "pod-1", extra={"endpoint": "10.0.0.1:80"})
    logged = json.loads(stream.getvalue())

    assert logged.pop("time").endswith("Z")
    assert logged == {
        "level": "warning",
        "logger": "extproc.test",
        "message": "scrape of pod-1 failed",
        "endpoint": "10.0.0.1:80",
    }


def test_an_exception_stays_on_its_json_line() -> None:
    stream = io.StringIO()
    configure_logging("INFO", is_json=True, stream=stream)
    try:
        raise ValueError("why")
    except ValueError:
        LOGGER.exception("failed", extra={"level": "mine", "odd": object})

    assert stream.getvalue().count("\n") == 1
    logged = json.loads(stream.getvalue())
    assert logged["exception"].endswith("ValueError: why")
    assert logged["level"] == "error"


def test_a_plain_line_has_the_extra_fields_behind_the_message() -> None:
    stream = io.StringIO()
    configure_logging("INFO", is_json=False, stream=stream)
    LOGGER.info("ready", extra={"port": 9002})

    assert stream.getvalue().endswith("INFO    extproc.test: ready port=9002\n")


def test_levels_below_the_configured_one_are_not_logged(lines: io.StringIO) -> None:
    LOGGER.debug("a decision")

    assert lines.getvalue() == ""


@pytest.mark.parametrize("credential", ["Bearer sk-123.abc", "bearer sk-123.abc", "Basic sk-123=="])
def test_credentials_are_blanked_wherever_they_stand(lines: io.StringIO, credential: str) -> None:
    try:
        raise ValueError(f'headers {{"authorization": "{credential}"}}')
    except ValueError:
        LOGGER.exception("failed with %s", credential, extra={"headers": {"a": credential}})

    assert "sk-123" not in lines.getvalue()
    assert lines.getvalue().count("***") == 3


@pytest.mark.parametrize("text", ["a\nb", "a\rb", "a\x1b[2Jb", "a\u2028b"])
def test_logged_values_cannot_forge_a_line_or_control_the_terminal(
    lines: io.StringIO, text: str
) -> None:
    LOGGER.info("model %s", text, extra={"field": text})

    assert lines.getvalue().endswith("\n")
    assert lines.getvalue()[:-1].isprintable()


def test_a_line_break_in_a_logged_value_is_written_as_an_escape(lines: io.StringIO) -> None:
    LOGGER.info("model %s", "a\nb")

    assert r"model a\nb" in lines.getvalue()


@given(st.text())
def test_a_json_line_is_json_whatever_is_logged(text: str) -> None:
    stream = io.StringIO()
    configure_logging("INFO", is_json=True, stream=stream)
    LOGGER.info('%s "Bearer %s" %s', text, text, text, extra={"field": text})

    assert stream.getvalue().count("\n") == 1
    assert set(json.loads(stream.getvalue())) == {"time", "level", "logger", "message", "field"}


def test_configuring_again_replaces_the_handler(lines: io.StringIO) -> None:
    other = io.StringIO()
    configure_logging("info", is_json=False, stream=other)
    LOGGER.info("once")

    assert lines.getvalue() == ""
    assert other.getvalue().count("once") == 1


def test_an_unknown_level_is_an_error() -> None:
    with pytest.raises(ValueError, match="LOUD"):
        configure_logging("loud", is_json=True)


def test_header_fields_are_not_logged_at_any_level() -> None:
    configure_logging("debug", is_json=True)

    assert not logging.getLogger("hpack.hpack").isEnabledFor(logging.DEBUG)


def _record(at_s: float, message: str = "%s", level: int = logging.INFO) -> logging.LogRecord:
    record = logging.LogRecord("x", level, "", 0, message, (object(),), None)
    record.created = at_s
    return record


def test_log_lines_caused_by_a_peer_are_limited_and_the_rest_counted() -> None:
    limit = RepeatLimit(max_records=3, window_s=10.0)

    assert [limit.filter(_record(100.0 + n)) for n in range(5)] == [True] * 3 + [False] * 2
    assert limit.filter(_record(105.0, "another line of the same logger"))
    first, second = _record(110.0), _record(110.0)
    assert limit.filter(first)
    assert limit.filter(second)
    assert vars(first)["left_out"] == 2
    assert "left_out" not in vars(second)


def test_a_clock_that_is_set_back_silences_nothing() -> None:
    limit = RepeatLimit(max_records=1, window_s=10.0)

    assert limit.filter(_record(1e9))
    assert limit.filter(_record(5.0))


def test_lines_of_no_number_of_kinds_are_remembered() -> None:
    limit = RepeatLimit(max_records=1, window_s=10.0)
    for number in range(100_000):
        assert limit.filter(_record(1.0, f"{number}"))

    assert sys.getsizeof(vars(limit)["_kinds"]) < 200_000


def test_debug_lines_are_never_left_out() -> None:
    limit = RepeatLimit(max_records=1, window_s=10.0)

    assert all(limit.filter(_record(1.0, level=logging.DEBUG)) for _ in range(5))


def test_a_line_that_repeats_is_written_so_often_at_most(lines: io.StringIO) -> None:
    for number in range(10 * MAX_REPEATS):
        LOGGER.warning("the data plane broke the protocol: %s", number)

    assert len(lines.getvalue().splitlines()) == MAX_REPEATS
