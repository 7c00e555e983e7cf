"""When garbage is collected, and what is left out of that."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from extproc.service.garbage import MAX_AGE_S, MAX_CHANGES, MIN_AGE_S, Garbage


class Scene:
    """A router's garbage, with requests and models that a test sets."""

    def __init__(self) -> None:
        self.now, self.num_requests, self.models = 0.0, 0, object()
        self.garbage = Garbage(
            num_requests=lambda: self.num_requests,
            models=lambda: self.models,
            clock=lambda: self.now,
        )

    def look(self, *, after_s: float = 1.0, num_new: int = 1) -> None:
        self.now += after_s
        self.num_requests += num_new
        self.garbage.tick()


class Cycle:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    gc.disable()
    yield made
    gc.enable()
    made.garbage.end()


def frozen_garbage(scene: Scene) -> weakref.ref[Cycle]:
    """A cycle that was left out of passes while it was in use, and that nobody needs any more."""
    kept = Cycle()
    scene.models = object()
    scene.look()
    return weakref.ref(kept)


def test_what_is_there_at_the_start_and_after_a_change_of_models_is_left_out(scene: Scene) -> None:
    counts = [gc.get_freeze_count()]
    scene.look()
    counts.append(gc.get_freeze_count())
    new = [Cycle() for _ in range(100)]
    scene.look()
    counts.append(gc.get_freeze_count())
    scene.models = object()
    scene.look()
    counts.append(gc.get_freeze_count())

    # What is freed meanwhile counts no longer.
    assert counts[0] == 0 < counts[2] <= min(counts[1], counts[3] - len(new))


def test_everything_is_collected_at_rest_and_not_again_without_news(scene: Scene) -> None:
    garbage = frozen_garbage(scene)
    scene.look(after_s=MIN_AGE_S)
    is_gone_while_busy = garbage() is None
    scene.look(num_new=0)
    collections = gc.get_stats()[2]["collections"]
    scene.look(after_s=MIN_AGE_S, num_new=0)

    assert (is_gone_while_busy, garbage() is None) == (False, True)
    assert gc.get_stats()[2]["collections"] == collections


def test_where_there_is_no_rest_everything_is_collected_in_the_end(scene: Scene) -> None:
    garbage = frozen_garbage(scene)
    scene.look(after_s=MAX_AGE_S / 2)
    before = garbage() is None
    scene.look(after_s=MAX_AGE_S / 2)

    assert (before, garbage() is None) == (False, True)


def test_where_models_change_with_every_look_what_each_change_left_out_is_collected_in_the_end(
    scene: Scene,
) -> None:
    garbage = [frozen_garbage(scene) for _ in range(MAX_CHANGES - 1)]
    num_before = sum(each() is not None for each in garbage)
    garbage += [frozen_garbage(scene) for _ in range(2)]

    assert num_before == MAX_CHANGES - 1
    assert sum(each() is not None for each in garbage) == 1
