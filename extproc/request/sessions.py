"""The session that a request belongs to, by the first of the operator's sources that it has.

A source is a header, a cookie, or a string in the top level of a JSON body. Clients choose these
values, which may be of any length and form. They decide where requests go, and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b

import msgspec

from extproc.request.jsonsmall import Members, decoders

MAX_FIELD_CHARS = 32
SOURCE = re.compile(
    r"header:[a-z0-9_-]+|cookie:[!#$%&'*+.^_`|~0-9A-Za-z-]+|"
    rf"body:[A-Za-z][A-Za-z0-9_]{{0,{MAX_FIELD_CHARS - 1}}}"
)
"""How an operator writes one."""

AGENT_HEADERS = (
    "header:x-claude-code-session-id",
    "header:session_id",
    "header:session-id",
    "header:x-session-id",
    "header:x-session-affinity",
)
"""Each names one conversation: of Claude Code, of Codex (two versions), of OpenCode, Crush and
others. `prompt_cache_key` and `user` name an application or a person, whose conversations would
all go to one endpoint."""

MAX_SESSION_BYTES = 4096
"""Longest value that names a session, as it is written: browsers keep no longer cookies."""

Session = tuple[str | None, str]
"""A digest, and the source that had it; `NO_SESSION` where none does."""
NO_SESSION: Session = (None, "")


class SessionSources:
    """The sources, in order.

    Args:
        sources: Each as `SOURCE` says.

    Attributes:
        headers: Names of those that are read.
        fields: Names of those of bodies, by the same in bytes.
        decoders: Of bodies with these fields, as `read_members` takes them.
    """

    def __init__(self, *sources: str) -> None:
        self._sources = [(source, *source.split(":", 1)) for source in dict.fromkeys(sources)]
        named = [(name, kind) for _, kind, name in self._sources]
        self.fields = {name.encode(): name for name, kind in named if kind == "body"}
        self.headers = frozenset(
            "cookie" if kind == "cookie" else name for name, kind in named if kind != "body"
        )
        self.decoders = decoders(self.fields.values())

    def find(self, headers: Mapping[str, str], fields: Mapping[str, bytes]) -> Session:
        """Return the session of a request; `fields` are of its body, as written there."""
        for source, kind, name in self._sources:
            if kind == "body":
                value = fields.get(name, b"")
            elif kind == "cookie":
                value = _cookie(headers.get("cookie", ""), name)
            else:
                value = headers.get(name, "").encode()
            if value and len(value) <= MAX_SESSION_BYTES:
                return blake2b(value, digest_size=16).hexdigest(), source
        return NO_SESSION

    def fields_of(self, members: Members) -> dict[str, bytes]:
        """Return what those fields are that `decoders` have found."""
        return {name: string_of(getattr(members, name)) for name in self.fields.values()}


def string_of(raw: msgspec.Raw | bytes) -> bytes:
    """Return a JSON string as it is written; b"" for one that is empty or too long, or another
    value."""
    text = bytes(raw) if 2 < len(raw) <= MAX_SESSION_BYTES else b""
    return text if text.startswith(b'"') else b""


def _cookie(text: str, name: str) -> bytes:
    """Return the first of that name, as it is written; a header that came twice has commas."""
    found = re.search(rf"(?:^|[;,])[ \t]*{re.escape(name)}=([^;,]*)", text)
    return b"" if found is None else found[1].rstrip().encode()


NO_SOURCES = SessionSources()
