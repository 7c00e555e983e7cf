"""Large bodies are sent on in passes, between which others have their turn."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from extproc.request import messages as m
from extproc.request.body import MAX_ECHO_BYTES, MAX_ECHOED
from extproc.request.codec import Codec
from extproc.request.interfaces import StreamSettings
from extproc.request.processor import LARGE_BYTES
from extproc.wire.rpc import Code
from tests.builders import body
from tests.request.ext_proc import (
    FULL_DUPLEX,
    phase,
    read,
    request_body,
    request_headers,
    request_trailers,
    response_headers,
)
from tests.request.fakerouter import FakeRouter
from tests.request.scene import Service

PASS_BYTES = MAX_ECHO_BYTES * MAX_ECHOED
PHASES = StreamSettings(uses_response_phases=True)
LARGE = body(prompt="p" * (5 * PASS_BYTES // 2))


class Scene:
    """A request whose body has come and is sent back to the data plane."""

    def __init__(
        self,
        sent: bytes = LARGE,
        chunk_bytes: int = 65_536,
        *,
        has_trailers: bool = False,
        service: Service | None = None,
    ) -> None:
        self.service = service or Service()
        self.call, self.session = self.service.open()
        self.session.receive(request_headers(body_mode=FULL_DUPLEX))
        for start in range(0, len(sent), chunk_bytes):
            is_last = start + chunk_bytes >= len(sent) and not has_trailers
            self.session.receive(request_body(sent[start : start + chunk_bytes], is_last))
        if has_trailers:
            self.session.receive(request_trailers())
        while not self.call.sent:
            assert self.take_turn()

    def take_turn(self) -> bool:
        """Run what is due; return whether there was anything."""
        timers = [timer for timer in self.service.timers if not timer.is_cancelled]
        self.service.timers.clear()
        for timer in timers:
            timer.callback()
        return bool(timers)

    def finish(self) -> list[int]:
        """Take turns until nothing is due; return how many messages each sent."""
        nums, before = [], len(self.call.sent)
        while self.take_turn():
            nums.append(len(self.call.sent) - before)
            before = len(self.call.sent)
        return nums

    @property
    def chunks(self) -> list[tuple[bytes, bool]]:
        """What was sent back of the body, and whether each part was the last."""
        bodies = [each for each in self.call.sent if phase(each) == "request_body"]
        mutations = [read(each).request_body.response.body_mutation for each in bodies]
        return [
            (bytes(each.streamed_response.body), bool(each.streamed_response.end_of_stream))
            for each in mutations
        ]

    @property
    def echoed(self) -> bytes:
        return b"".join(data for data, _ in self.chunks)


@given(st.integers(0, 3), st.integers(-1, 1), st.sampled_from([30_000, 62_000, 65_536, 10**9]))
def test_all_of_it_is_sent_on_and_no_pass_sends_much(
    num_passes: int, more: int, chunk_bytes: int
) -> None:
    empty = len(body(prompt=""))
    sent = body(prompt="p" * max(0, num_passes * PASS_BYTES + more - empty))
    scene = Scene(sent, chunk_bytes)
    nums = [len(scene.call.sent) - 1, *scene.finish()]

    assert scene.echoed == sent
    assert [last for _, last in scene.chunks] == [False] * (len(scene.chunks) - 1) + [True]
    assert max(nums) <= MAX_ECHOED
    assert scene.call.code is Code.OK


def test_trailers_come_after_all_of_the_body() -> None:
    scene = Scene(has_trailers=True)
    scene.finish()

    assert scene.echoed == LARGE
    assert not any(last for _, last in scene.chunks)
    assert phase(scene.call.sent[-1]) == "request_trailers"


def test_what_waits_to_be_sent_counts_as_held() -> None:
    scene = Scene()
    waiting = scene.call.held
    scene.finish()

    assert (waiting[0] >= len(LARGE), waiting[1]) == (True, True)
    assert scene.call.held[0] == 0


def test_a_data_plane_that_has_said_all_gets_the_rest_before_the_end() -> None:
    scene = Scene()
    scene.session.half_close()
    meanwhile = scene.call.code
    scene.finish()

    assert (meanwhile, scene.call.code, scene.echoed) == (None, Code.OK, LARGE)


def test_what_comes_meanwhile_is_answered_after_the_rest() -> None:
    service = Service(settings=PHASES)
    scene = Scene(service=service)
    assert len(scene.echoed) < len(LARGE)
    scene.session.receive(response_headers({":status": "200"}))

    assert scene.echoed == LARGE
    assert phase(scene.call.sent[-1]) == "response_headers"
    num_sent = len(scene.call.sent)
    scene.finish()
    assert len(scene.call.sent) == num_sent


def test_nothing_more_is_sent_to_who_has_left() -> None:
    scene = Scene()
    num_sent = len(scene.call.sent)
    scene.session.closed()
    scene.finish()

    assert len(scene.call.sent) == num_sent
    assert scene.service.processor.num_open == 0


def test_the_rest_is_given_up_for_want_of_memory() -> None:
    scene = Scene()
    num_sent = len(scene.call.sent)
    give_up: Callable[[], None] = getattr(scene.session, "give_up")  # noqa: B009 - optional
    give_up()
    scene.finish()

    assert scene.call.code is Code.RESOURCE_EXHAUSTED
    assert len(scene.call.sent) == num_sent
    assert not any(scene.service.processor.num_broken.values())


class Renaming(Scene):
    """A request whose whole body has come, for a model that pods know by another name."""

    def __init__(self, num_bytes: int = 2 * LARGE_BYTES) -> None:
        self.service = Service(router=FakeRouter(targets={"alias": "a"}), settings=PHASES)
        self.call, self.session = self.service.open()
        self.prompt = "p" * num_bytes
        self.session.receive(request_headers())
        self.session.receive(request_body(body("alias", prompt=self.prompt), True))
        while not self.service.router.decisions:
            assert self.take_turn()

    @property
    def changed(self) -> list[bytes]:
        """The bodies that were sent in place of the one that came."""
        bodies = [
            read(each).request_body for each in self.call.sent if phase(each) == "request_body"
        ]
        return [each.response.body_mutation.body for each in bodies]


def test_a_large_body_with_another_model_is_sent_in_a_pass_of_its_own() -> None:
    scene = Renaming()
    waiting, held = scene.changed, scene.call.held
    scene.take_turn()

    assert (waiting, scene.changed) == ([], [body("a", prompt=scene.prompt)])
    assert (held[0] >= len(scene.prompt), held[1]) == (True, True)
    assert scene.call.held[0] == 0
    assert not scene.finish()


def test_a_small_body_with_another_model_is_sent_at_once() -> None:
    scene = Renaming(num_bytes=100)

    assert scene.changed == [body("a", prompt=scene.prompt)]
    assert not scene.finish()


def test_what_comes_before_a_large_body_is_sent_is_answered_after_it() -> None:
    scene = Renaming()
    scene.session.receive(response_headers({":status": "200"}))

    assert scene.changed == [body("a", prompt=scene.prompt)]
    assert [phase(each) for each in scene.call.sent] == [
        "request_headers",
        "request_body",
        "response_headers",
    ]
    scene.finish()
    assert len(scene.call.sent) == 3


class FailingCodec(Codec):
    """Fails at a chunk."""

    num_left = MAX_ECHOED + 1

    def encode(self, command: m.Command) -> bytes:
        if isinstance(command, m.EchoBody):
            self.num_left -= 1
            if not self.num_left:
                raise RuntimeError("cannot be written")
        return super().encode(command)


def test_an_error_in_a_later_pass_never_ends_with_ok() -> None:
    scene = Scene(service=Service(codec=FailingCodec()))
    assert scene.call.code is None
    scene.finish()

    assert scene.call.code is Code.INTERNAL
