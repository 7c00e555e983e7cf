"""Objects that no definition would allow."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    st.sampled_from(["/../x", "hf:a", "s3://x", "a,b", " ", "\x00", "9" * 400]),
)
JSON = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=10,
)


def _places(thing: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(thing, dict):
        inner = [each for key in thing for each in _places(thing[key], (*path, key))]
    elif isinstance(thing, list):
        inner = [each for at, _ in enumerate(thing) for each in _places(thing[at], (*path, at))]
    else:
        inner = []
    return [*([path] if path else []), *inner]


@st.composite
def changed(draw: st.DrawFn, spec: Any) -> Any:
    """The spec with something else in one or two places."""
    made = copy.deepcopy(spec)
    for _ in range(draw(st.integers(1, 2))):
        *way, last = draw(st.sampled_from(_places(made)))
        inner = made
        for key in way:
            inner = inner[key]
        if draw(st.booleans()):
            inner[last] = draw(JSON)
        else:
            del inner[last]
        if not _places(made):
            break
    return made
