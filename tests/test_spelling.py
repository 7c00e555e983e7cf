"""Adapters named after their base model, in lists and bodies, in each body mode."""

from __future__ import annotations

import json

import pytest

from extproc.errors import RequestError
from extproc.openai import Spelling, joined
from extproc.paths import RouteTable
from extproc.request import messages as m
from extproc.request.body import BodyReader
from extproc.request.interfaces import StreamSettings
from extproc.request.jsonmodel import JsonReader
from extproc.request.messages import BodyMode
from extproc.types import ModelCard, RequestInfo
from tests.builders import body, pick, request_headers
from tests.request.fakerouter import Exchange, FakeRouter

CARDS = {
    "qwen": ModelCard("qwen"),
    "sql": ModelCard("sql", "qwen"),
    "any": ModelCard("any", ""),
    "a:b": ModelCard("a:b", "qwen"),
}
SGLANG = Spelling(CARDS.get, joins=True)


@pytest.mark.parametrize(
    ("written", "listed"),
    [
        ("qwen:sql", "sql"),
        ("other:sql", "other:sql"),
        ("other:any", "any"),
        ("qwen:nope", "qwen:nope"),
        ("x:qwen", "x:qwen"),
        ("a:b", "a:b"),
        ("qwen:a:b", "a:b"),
        ("sql", "sql"),
        ("qwen", "qwen"),
    ],
)
def test_a_name_with_its_base_model_is_the_adapter_s(written: str, listed: str) -> None:
    assert SGLANG.listed(written) == listed
    assert Spelling(CARDS.get).listed(written) == written


@pytest.mark.parametrize(
    ("listed", "full"), [("sql", "qwen:sql"), ("any", ":any"), ("qwen", "qwen"), ("x", "x")]
)
def test_a_pod_reads_an_adapter_s_name_after_its_base_model_s(listed: str, full: str) -> None:
    assert SGLANG.full(listed) == full
    assert Spelling(CARDS.get).full(listed) == listed


def test_an_adapter_in_the_model_comes_before_one_beside_it() -> None:
    assert (joined("qwen", "sql"), joined("qwen:a", "sql")) == ("qwen:sql", "qwen:a")


# --- bodies -------------------------------------------------------------------------------------


def read(text: bytes, step: int) -> str:
    reader = JsonReader(takes_adapter=True)
    for start in range(0, len(text), step):
        part, at = text[start : start + step], 0
        while at < len(part):
            at = reader.feed(part, at)
    return reader.result()


@pytest.mark.parametrize("step", [1, 7, 1000])
@pytest.mark.parametrize(
    ("text", "model"),
    [
        (b'{"model":"qwen","lora_path":"sql"}', "qwen:sql"),
        (b'{"lora_path" : "\\u0073ql", "x":{"lora_path":"no"},"model":"qwen"}', "qwen:sql"),
        (b'{"model":"qwen","lora_path":null}', "qwen"),
        (b'{"model":"qwen","lora_path":"a","lora_path":null }', "qwen"),
        (b'{"model":"qwen","lora_path":""}', "qwen"),
        (b'{"model":"qwen:a","lora_path":"sql"}', "qwen:a"),
    ],
)
def test_an_adapter_beside_the_model_is_read_however_the_body_is_cut(
    text: bytes, model: str, step: int
) -> None:
    assert read(text, step) == model


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize("value", ['["a","b"]', "7", "{}", json.dumps("x" * 9000), "nul"])
def test_anything_else_beside_the_model_is_refused(value: str, step: int) -> None:
    with pytest.raises(RequestError) as caught:
        read(b'{"model":"qwen","lora_path":%s}' % value.encode(), step)

    assert caught.value.rejection.status == 400


def test_other_engines_have_no_adapter_beside_the_model() -> None:
    reader = JsonReader()
    reader.feed(b'{"model":"qwen","lora_path":["sql"]}')

    assert reader.result() == "qwen"


def test_an_adapter_that_comes_after_the_decision_is_refused() -> None:
    route = RouteTable().match("POST", "/v1/completions")
    reader = BodyReader(
        route,  # type: ignore[arg-type]
        "",
        max_bytes=9000,
        allows_stored=False,
        early_bytes=1,
        takes_adapter=True,
    )
    reader.add(b'{"model":"qwen",')
    reader.read()
    assert reader.model_so_far() == "qwen"
    reader.settle("qwen")
    reader.add(b'"lora_path":"sql"}')

    with pytest.raises(RequestError):
        reader.read()


# --- requests -----------------------------------------------------------------------------------


def begin(mode: BodyMode, sent: bytes) -> tuple[FakeRouter, list[m.Command]]:
    """A request to a pod that lists `sql`."""
    router = FakeRouter(pick(info=RequestInfo("sql")), spelling=SGLANG)
    settings = StreamSettings(takes_adapter=True)
    exchange = Exchange(router, router.stream(settings, lambda: None))
    headers = request_headers(body_mode=mode, sends_body_early=True)
    return router, [*exchange.tell(headers), *exchange.tell(m.BodyChunk(sent, True))]


@pytest.mark.parametrize("mode", [BodyMode.BUFFERED, BodyMode.FULL_DUPLEX_STREAMED])
def test_a_listed_name_goes_on_with_its_base_model(mode: BodyMode) -> None:
    router, commands = begin(mode, body("sql"))
    [request] = router.routed
    [sent] = [
        each.body if isinstance(each, m.ContinueBody) else each.data
        for each in commands
        if isinstance(each, m.ContinueBody | m.EchoBody)
    ]

    assert (request.model, request.written) == ("sql", "sql")
    assert sent == body("qwen:sql")


@pytest.mark.parametrize("mode", [BodyMode.BUFFERED, BodyMode.STREAMED])
@pytest.mark.parametrize("sent", [body("qwen:sql"), body("qwen", lora_path="sql")])
def test_what_the_engine_understands_goes_on_as_it_is(mode: BodyMode, sent: bytes) -> None:
    router, commands = begin(mode, sent)
    [request] = router.routed

    assert (request.model, request.written) == ("sql", "")
    assert [each.body for each in commands if isinstance(each, m.ContinueBody)] == [None]


def test_a_listed_name_is_refused_where_the_body_is_not_ours_to_change() -> None:
    router, commands = begin(BodyMode.STREAMED, body("sql"))

    assert not router.routed
    assert [each.status for each in commands if isinstance(each, m.Reply)] == [500]
    [rejection] = router.rejections
    assert rejection.reason == "model_not_rewritable"
