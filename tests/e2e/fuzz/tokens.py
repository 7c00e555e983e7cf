"""Hostile holders of a token: what a team with a right to declare adapters may do to all others.

Their token is limited to names that no honest client asks for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Final

from extproc.adapters.declared import MAX_TARGETS
from tests.e2e.fuzz.field import Attack, Field, by_name, chat, crowd

TOKEN: Final = "fuzz-secret"
"""Of the line that `Target` writes into the router's token file."""
TOKEN_LINE: Final = f"{TOKEN} name=fuzz allow=fuzz-*\n"

_LIST_BYTES: Final = 240 * 1024  # of a list that is taken
_MAX_NAMES: Final = 5000


async def aliases_of_many_targets(field: Field) -> str:
    """Names that each stand for as many others as may be, then lists of models without end."""
    each = {"targets": [{"model": f"zz{number:03d}"} for number in range(MAX_TARGETS)]}
    num = _LIST_BYTES // len(json.dumps(each))
    said = [{"name": _name(field), **each} for _ in range(num)]
    await _declare(field, said)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(field.a_while_s()):
            for _ in range(200):
                field.note(await field.ask(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"))
    return "left"


async def declares_and_deletes(field: Field) -> str:
    """The same name, again and again."""
    name = _name(field)
    for number in range(10):
        await _declare(field, [{"name": name, "source": f"hf:org/weights-{number}"}])
        await _send(field, "DELETE", f"/v1/adapters/{name}", b"")
    return "left"


async def asks_while_checked(field: Field) -> str:
    """A new name, and requests for it at once: it is loaded, and its effect checked, meanwhile."""
    name = _name(field)
    await _declare(field, [{"name": name, "source": f"hf:org/{name}"}])
    for said in await asyncio.gather(*(field.post(chat(name)) for _ in range(8))):
        field.note(said)
    return "left"


async def odd_declarations(field: Field) -> str:
    """Names, sources and numbers that none has."""
    odd: tuple[object, ...] = (
        *({"name": "fuzz-" + "x" * 10_000}, {"name": "adapter-00"}, {"name": "fuzz-a", "x": 1}),
        {"name": "fuzz-a", "source": "/" + "y" * 200_000},
        {"name": "fuzz-a", "targets": [{"model": "b", "weight": 1e300}] * 100},
        {"name": "fuzz-a", "tenants": ["t"] * 5000, "priority": 10**30},
        [{"name": "fuzz-a", "source": "hf:a/b"}] * 5000,
        [[[]]] * 20_000,
    )
    return await _declare(field, field.rng.choice(odd))


def _name(field: Field) -> str:
    return f"fuzz-own-{field.rng.randrange(_MAX_NAMES)}"


def _many(field: Field) -> list[dict[str, str]]:
    begin = field.rng.randrange(_MAX_NAMES)
    numbers = [(begin + number) % _MAX_NAMES for number in range(1000)]
    # A name's source is always the same, so that none of it is a conflict.
    return [{"name": f"fuzz-{each}", "source": f"hf:org/{each % 9}"} for each in numbers]


async def _declare(field: Field, said: object, query: str = "") -> str:
    return await _send(field, "POST", f"/v1/adapters{query}", json.dumps(said).encode())


async def _send(field: Field, method: str, path: str, body: bytes) -> str:
    status = await field.ask(_head(method, path, len(body)) + body, field.admin_port)
    field.note(status)
    return status


def _head(method: str, path: str, num_bytes: int) -> bytes:
    lines = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {TOKEN}\r\n"
    return f"{lines}content-length: {num_bytes}\r\n\r\n".encode()


TOKENS: Final[Mapping[str, Attack]] = {
    # Eight of the longest lists of declarations at the same moment.
    "lists_at_once": lambda field: crowd(_declare(field, _many(field)) for _ in range(8)),
    # Calls that wait for loads that never come.
    "waits_without_end": lambda field: crowd(
        _declare(field, {"name": _name(field), "source": "hf:org/nowhere"}, "?wait=600")
        for _ in range(8)
    ),
    # As many bodies as there are places, none of them whole.
    "bodies_that_stop": lambda field: crowd(
        field.leave(_head("POST", "/v1/adapters", 200_000) + b"[" * 1000, field.admin_port)
        for _ in range(16)
    ),
    **by_name(aliases_of_many_targets, declares_and_deletes, asks_while_checked, odd_declarations),
}
