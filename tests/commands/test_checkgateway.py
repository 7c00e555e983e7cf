from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from aiohttp import web
from typer.testing import CliRunner

from extproc.commands.gatewaycheck import OPTIONAL, REQUIRED, check_gateway
from extproc.commands.main import app
from tests.servers import web_server

PAGE = Path(__file__).parents[2] / "docs" / "gateways.md"
ADMIN = "http://127.0.0.1:1"


def test_the_documentation_lists_the_same_requirements_in_the_same_words() -> None:
    sections = dict(re.findall(r"^### (.+?)\n(.*?)(?=^##|\Z)", PAGE.read_text(), re.M | re.S))

    def listed(section: str) -> tuple[str, ...]:
        return tuple(re.findall(r"^- \*\*(.+?)\*\*", sections[section], re.MULTILINE))

    assert listed("Required") == tuple(REQUIRED)
    assert listed("Optional") == tuple(OPTIONAL)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("gateway", "--admin", ADMIN), "is not an http:// or https:// URL"),
        (("http://gateway", "--admin", "router:9091"), "is not an http:// or https:// URL"),
        (("http://gateway",), "Missing option '--admin'"),
        (("http://gateway", "--admin", ADMIN, "--tenant", "acme"), "belong together"),
        (("http://gateway", "--admin", ADMIN, "--header", "Host"), "must be `Name: value`"),
        (("http://gateway", "--admin", ADMIN, "--ca-file", "/none"), "/none: "),
    ],
)
def test_what_is_asked_wrong_is_told(arguments: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(app, ["check-gateway", *arguments], env={"COLUMNS": "200"})

    assert result.exit_code != 0
    assert said in result.output


async def test_where_nobody_answers_the_rest_is_not_tried() -> None:
    checks = await check_gateway("http://127.0.0.1:1", [ADMIN], model="m")

    assert [each.requirement for each in checks] == [next(iter(REQUIRED)), *OPTIONAL]
    assert {each.passed for each in checks} == {False}
    assert "127.0.0.1:1" in checks[0].detail


async def test_a_gateway_that_does_not_answer_in_time_is_named_as_such() -> None:
    async def never(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with web_server(never) as url:
        checks = await check_gateway(url, [ADMIN], model="m", timeout_s=0.1)

    assert (checks[0].passed, checks[0].detail) == (False, "no end within 0.1 s")


async def test_without_a_model_the_first_one_that_is_listed_is_asked_for() -> None:
    asked = []

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "first"}, {"id": "second"}]})
        asked.append((await request.json())["model"])
        return web.json_response({"error": {"message": "no such model"}}, status=404)

    async with web_server(answer) as url:
        checks = await check_gateway(url, [ADMIN], headers={"Host": "llm.example"})

    assert asked == ["first", "first"]
    assert checks[0].detail == 'HTTP 404: {"error": {"message": "no such model"}}'
