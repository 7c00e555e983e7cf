"""The stored declaration of one adapter, as bytes: a JSON object with the fields that people write.

    {"name": "org/name", "source": "/adapters/name", "version": "2", "base": "", "rank": 16,
     "replicas": {"min": 1, "max": null}, "load": "auto", "tenants": ["acme"], "priority": 10,
     "deleted": false}
    {"name": "expert", "targets": [{"model": "org/name", "weight": 90}, {"model": "other"}]}

Only `name` is required. Fields that this version does not know are ignored in what is stored: a
newer router may have written them. Its tag is a hash of these bytes, the same in every medium.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from extproc.adapters.declared import (
    NO_TERMS,
    AliasTarget,
    Declaration,
    DeclarationError,
    Replicas,
    Terms,
    Written,
)
from extproc.errors import ExtprocError


class StoreError(ExtprocError):
    """The medium cannot be read or written now; the message says why, for people."""


class StoreFullError(StoreError):
    """There is no room for more: on the disk, in the server's memory, or by our own limit."""


MAX_CONTENT_BYTES = 8 * 1024
"""Of one declaration: names and a source of the longest kind have 2 KB, and 5 KB where other
programs write what is not ASCII as `\\u00fc`."""
MAX_DECLARATIONS = 10_000
"""Places in one store, of which a declaration takes one, and more with many tenants and targets;
deleted ones included until they are forgotten: 80 MB of contents, 17 MB if all are declared over
HTTP, as long as can be."""


class Stored(Struct, frozen=True):
    """One adapter as a store has it.

    Attributes:
        tag: Of this content; another content has another.
        is_deleted: Whether it was deleted. It is kept until pods have let go of it, so that a
            router that restarts meanwhile knows what to unload.
    """

    declaration: Declaration
    tag: str
    is_deleted: bool = False


class ConflictError(ExtprocError):
    """Another content is there than the writer expected.

    Attributes:
        tag: Of what is there; "" where nothing is.
    """

    def __init__(self, message: str, tag: str) -> None:
        super().__init__(message)
        self.tag = tag


class Put(Struct, frozen=True):
    """The declaration after a put: its tag, and the put's effect."""

    tag: str
    change: Literal["none", "created", "replaced"]


class _Replicas(Replicas, forbid_unknown_fields=True):
    """In a store there is no other field."""


class _Adapter(Written, omit_defaults=True):
    replicas: _Replicas | UnsetType = UNSET  # not null, which only Kubernetes sends
    tenants: tuple[str, ...] = ()
    priority: int | None = None
    targets: tuple[AliasTarget, ...] = ()

    def declared(self) -> Declaration:
        """Return what is declared.

        Raises:
            DeclarationError: It cannot stand.
        """
        terms = Terms(frozenset(self.tenants), self.priority, self.targets)
        return self.declaration(origin="store", terms=NO_TERMS if terms == NO_TERMS else terms)


class _Content(_Adapter, omit_defaults=True):
    deleted: bool = False


class _Asked(_Adapter, forbid_unknown_fields=True):
    """From a client, for whom an unknown field is a mistake."""


_Parsed = TypeVar("_Parsed", bound=_Adapter)

_CONTENT = msgspec.json.Decoder(_Content)
_ASKED = msgspec.json.Decoder(_Asked)
_LIST = msgspec.json.Decoder(list[msgspec.Raw])


def encode(declaration: Declaration, *, is_deleted: bool = False) -> bytes:
    """Return the content for a declaration.

    Raises:
        DeclarationError: It is larger than `MAX_CONTENT_BYTES`.
    """
    replicas = _Replicas(declaration.min_replicas, declaration.max_replicas)
    terms = declaration.terms
    content = msgspec.json.encode(
        _Content(
            name=declaration.name,
            source=declaration.source,
            version=declaration.version,
            base=declaration.base,
            rank=declaration.rank,
            replicas=UNSET if replicas == _Replicas() else replicas,
            load=declaration.load,
            tenants=tuple(sorted(terms.tenants)),
            priority=terms.priority,
            targets=terms.targets,
            deleted=is_deleted,
        )
    )
    if len(content) > MAX_CONTENT_BYTES:
        raise DeclarationError(f"larger than {MAX_CONTENT_BYTES} bytes")
    return content


def as_json(declaration: Declaration) -> dict[str, Any]:
    """Return a declaration as values of JSON, with all fields but `origin`."""
    terms = declaration.terms
    return {
        "name": declaration.name,
        "source": declaration.source,
        "version": declaration.version,
        "base": declaration.base,
        "rank": declaration.rank,
        "replicas": {"min": declaration.min_replicas, "max": declaration.max_replicas},
        "load": declaration.load.value,
        "tenants": sorted(terms.tenants),
        "priority": terms.priority,
        "targets": [{"model": each.model, "weight": each.weight} for each in terms.targets],
    }


def decode(content: bytes) -> Stored:
    """Return what is stored.

    Raises:
        DeclarationError: It is no declaration, or one that cannot stand.
    """
    found = _parse(_CONTENT, content)
    return Stored(found.declared(), tag_of(content), found.deleted)


def decode_asked(body: bytes) -> Declaration:
    """Return what a client declares.

    Raises:
        DeclarationError: As `decode`; also for a field that does not exist.
    """
    return _parse(_ASKED, body).declared()


def decode_all(body: bytes, most: int) -> Iterator[Declaration | DeclarationError]:
    """Yield what a client declares in a list: of each item, what it is or why it is nothing.

    Args:
        body: JSON.
        most: Items; of more the rest is not read, but for one.

    Raises:
        DeclarationError: It is no list.
    """
    try:
        items = _LIST.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DeclarationError(f"not a list of declarations: {error}") from error
    for item in items[: most + 1]:
        try:
            yield decode_asked(bytes(item))
        except DeclarationError as error:
            yield DeclarationError(str(error))  # without the frames that it was raised in


def tag_of(content: bytes) -> str:
    """Return the tag of a content."""
    return hashlib.sha256(content).hexdigest()[:32]


def _parse(decoder: msgspec.json.Decoder[_Parsed], content: bytes) -> _Parsed:
    if len(content) > MAX_CONTENT_BYTES:
        raise DeclarationError(f"larger than {MAX_CONTENT_BYTES} bytes")
    try:
        return decoder.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DeclarationError(f"not a declaration: {error}") from error


class Medium(Protocol):
    """Keeps the contents of a store, by key: files, a database, a server. It knows nothing of them
    but the name of the adapter that each is about.

    Every call is atomic against all other users of the medium, except where people may put files,
    and either succeeds or raises StoreError.

    Attributes:
        keeps_deleted: Whether deleted declarations are kept until pods have let go of the adapter.
    """

    keeps_deleted: bool

    async def read(self) -> Mapping[str, bytes | StoreError]:
        """Return all contents, the same object as before if nothing has changed since.

        A key is an adapter's name, or where people may put files a file's name. A content that
        cannot be read is an error in its place.
        """

    async def get(self, name: str) -> bytes | None:
        """Return the content about one adapter."""

    async def swap(self, name: str, old: bytes | None, new: bytes | None) -> bool:
        """Replace the content about one adapter if it is `old`; return whether it was.

        None stands for no content. When this returns, the new content survives a crash.

        Raises:
            StoreFullError: There is no room; nothing has changed.
        """

    async def lease(self, holder: str, *, ttl_s: float) -> bool:
        """Take or renew the lease; return whether `holder` has it for the next `ttl_s`."""

    async def release(self, holder: str) -> None:
        """Give the lease up if `holder` has it."""

    async def changed(self) -> None:
        """Return when something may have changed, within the medium's interval in any case."""

    async def aclose(self) -> None:
        """Release everything."""
