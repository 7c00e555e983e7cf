"""The chart of first tokens."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from extproc.lab.loadtest.locust.firsttokens import chart
from extproc.lab.workload.exchange import RequestRecord


def record(number: int, first_s: float | None) -> RequestRecord:
    sent_s = number / 10
    first_at_s = None if first_s is None else sent_s + first_s
    return RequestRecord(number, "a", "", sent_s, sent_s, sent_s + 1, first_at_s)


@pytest.mark.parametrize("num", [0, 1, 40])
def test_each_first_token_is_a_point_and_what_has_none_is_left_out(num: int) -> None:
    records = [record(number, 0.1) for number in range(num)]
    drawn, same = chart(records), chart([*records, record(num - 1, None)])

    assert drawn == same
    assert drawn != chart([*records, record(num + 1, 0.1)])
    words = [each.text for each in ET.fromstring(drawn).iter() if each.text]
    assert {"a request", "median", "ms to the first token"} <= set(words)
