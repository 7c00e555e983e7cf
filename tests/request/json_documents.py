"""Hypothesis strategies for JSON texts as hostile clients write them."""

from __future__ import annotations

import json

from hypothesis import strategies as st

KEYS = [
    '"model"',
    '"mo\\u0064el"',
    '"\\u006D\\u006f\\u0064\\u0065\\u006C"',
    '"Model"',
    '"model "',
    '"models"',
    '"\\"model\\""',
    '"mod\\u0000el"',
    '"previous_response_id"',
    '"x"',
    '""',
    '"\\ud800"',
    '"é"',
]
WHITESPACE = ["", "", "", " ", "\n", "\t\r\n  "]

keys = st.sampled_from(KEYS)
gaps = st.sampled_from(WHITESPACE)
scalars = st.sampled_from(
    ["null", "true", "false", "0", "-0", "-1.5e+30", "1e999", "NaN", "Infinity", "-Infinity"]
) | st.integers().map(str)
odd_strings = st.sampled_from(
    [
        '"\\ud800"',
        '"\\udc00\\ud800"',
        '"\\ud83d\\ude00"',
        '"\\ud83dA"',
        '"\\"}"',
        '"\\\\"',
        '"\\\\\\""',
        '"\\/\\b\\f"',
        '"\x7f"',
        '"{\\"model\\": \\"inner\\"}"',
    ]
)
strings = odd_strings | st.builds(
    json.dumps, st.text(max_size=8), ensure_ascii=st.booleans()
).filter(lambda text: text.isascii() or not any(0xD800 <= ord(c) < 0xE000 for c in text))
names = st.builds(json.dumps, st.sampled_from(["a", "adapter-7", "org/é", "日本", "\U0001f600"]))


def _arrays(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(values, max_size=3).map(lambda items: f"[{','.join(items)}]")


@st.composite
def objects(
    draw: st.DrawFn, values: st.SearchStrategy[str], keys: st.SearchStrategy[str] = keys
) -> str:
    """An object's text; keys may repeat."""
    members = [
        f"{draw(gaps)}{draw(keys)}{draw(gaps)}:{draw(gaps)}{draw(values)}{draw(gaps)}"
        for _ in range(draw(st.integers(0, 4)))
    ]
    return "{" + ",".join(members) + "}"


values = st.recursive(scalars | strings | names, lambda v: _arrays(v) | objects(v), max_leaves=8)


@st.composite
def documents(draw: st.DrawFn) -> str:
    """The text of a whole document, mostly an object, now and then another value."""
    body = draw(objects(names | values) | values)
    return f"{draw(gaps)}{body}{draw(gaps)}"


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, str, int]:
    """An object with exactly one `model`, a string: text, its value, where it is complete."""
    others = st.lists(
        st.tuples(st.sampled_from(KEYS[3:]), values).map(lambda m: f"{m[0]} : {m[1]}"), max_size=3
    )
    before = "".join(f"{member} ," for member in draw(others))
    after = "".join(f", {member}" for member in draw(others))
    name = draw(names)
    head = f"{draw(gaps)}{{{draw(gaps)}{before}{draw(gaps)}{draw(st.sampled_from(KEYS[:3]))}:{name}"
    return f"{head}{draw(gaps)}{after}}}", json.loads(name), len(head.encode())
