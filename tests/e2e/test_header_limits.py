"""Requests with nearly as many header lines as Envoy accepts: the router adds its own."""

from __future__ import annotations

import pytest

from extproc.envoyconfig import Mode
from tests.e2e.conftest import running_envoy
from tests.e2e.harness import RouterProcess, chat, eventually, raw_request

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

BODY = chat("base")
HEAD = (
    "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    f"content-length: {len(BODY)}\r\nconnection: close\r\n"
)


def request(num_lines: int) -> bytes:
    """A request with `num_lines` header lines."""
    more = "".join(
        f"x-more-{number}: 1\r\n" for number in range(num_lines - HEAD.count("\r\n") + 1)
    )
    return f"{HEAD}{more}\r\n".encode() + BODY


@pytest.mark.parametrize("mode", list(Mode))
async def test_a_request_with_any_number_of_header_lines_is_served_or_refused_with_431(
    mode: Mode, router: RouterProcess
) -> None:
    async with running_envoy(mode, router) as envoy:
        answers = [await raw_request(envoy.port, request(count)) for count in range(88, 104)]
    statuses = [answer.status for answer in answers]

    assert set(statuses) == {200, 431}
    assert statuses == sorted(statuses)
    assert {each.error_code for each in answers if each.status == 431} == {"headers_too_large"}
    await eventually(router.has_none_in_flight)
