"""The last known state of one list, kept by lists and watches.

1. A list replaces the store as a whole, once its last page has come.
2. An event is applied if it is newer than everything seen before; repetitions by a broken
   connection or a proxy are ignored. Resource versions of one resource are compared as numbers; one
   that is not a number always counts as newer.
   Source: kubernetes.io/docs/reference/using-api/api-concepts/#resource-versions.
3. Nothing but a list empties the store: errors change nothing.
4. The query decides which parts of the objects are kept, page by page and after events.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct, field

from extproc.discovery.kubernetes.objects import KubeObject, Metadata, Query
from extproc.errors import ExtprocError

T = TypeVar("T", bound=KubeObject)

GONE = 410


class ApiError(ExtprocError):
    """The API server refused or failed. Try again later.

    Attributes:
        reason: A short slug for metrics.
        retry_after_s: Time before the next attempt that the server asks for; 0 for none.
        is_gone: The resource version is too old to continue from: list again.
    """

    def __init__(
        self, reason: str, message: str, *, retry_after_s: float = 0.0, is_gone: bool = False
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.is_gone = is_gone


class _Details(Struct, rename="camel"):
    retry_after_seconds: float | None = None


class _Status(Struct):
    code: int = 0
    message: str = ""
    details: _Details | None = None


class _ListMetadata(Struct, rename="camel"):
    resource_version: str = ""
    next_page: str = field(default="", name="continue")


class _Page(Struct):
    metadata: _ListMetadata
    items: tuple[msgspec.Raw, ...] | None = None


class _Event(Struct):
    type: str
    object: msgspec.Raw


_pages = msgspec.json.Decoder(_Page)
_events = msgspec.json.Decoder(_Event)
_statuses = msgspec.json.Decoder(_Status)
_bookmarks = msgspec.json.Decoder(KubeObject)


class ObjectStore(Generic[T]):
    """Objects of one query, by namespace and name.

    Attributes:
        resource_version: The version that a watch continues from; empty before the first list.
    """

    def __init__(self, query: Query[T]) -> None:
        self.resource_version = ""
        self._query = query
        self._objects: dict[tuple[str, str], T] = {}
        self._fresh: dict[tuple[str, str], T] = {}
        self._object = msgspec.json.Decoder(query.kind)

    @property
    def objects(self) -> Collection[T]:
        """All of them."""
        return self._objects.values()

    def read_page(self, body: bytes, *, is_first: bool) -> str:
        """Record a page of a list, or raise ApiError; return the next one's token, "" for none."""
        try:
            page = _pages.decode(body)
            # One after another: what is not kept of an object may be ten times its text.
            found = [self._query.kept(self._object.decode(each)) for each in page.items or ()]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError("malformed", f"no list: {error}") from error
        if page.items is None and not page.metadata.resource_version:
            raise ApiError("malformed", "no list: it has neither items nor a resourceVersion")
        if is_first:
            self._fresh = {}
        self._fresh.update((_key(each.metadata), each) for each in found if each is not None)
        self._query.bound(self._fresh)
        if not page.metadata.next_page:
            self._objects, self._fresh = self._fresh, {}
            self.resource_version = page.metadata.resource_version
        return page.metadata.next_page

    def read_event(self, line: bytes) -> bool:
        """Record an event of a watch; return whether it changed an object.

        Raises:
            ApiError: It is an error, or no event. Watch again, or list if `is_gone`.
        """
        try:
            event = _events.decode(line)
            if event.type == "ERROR":
                status = _statuses.decode(event.object)
                retry_after_s = (status.details or _Details()).retry_after_seconds or 0.0
                raise error_of(status.code, status.message, retry_after_s)
            if event.type == "BOOKMARK":
                self._is_news(_bookmarks.decode(event.object).metadata)
                return False
            changed = self._object.decode(event.object)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError("malformed", f"no event: {error}") from error
        return self._is_news(changed.metadata) and self._apply(event.type, changed)

    def bound(self) -> None:
        """Keep less of some objects where all of them are too much; to be called after events."""
        self._query.bound(self._objects)

    def _is_news(self, metadata: Metadata) -> bool:
        version, known = metadata.resource_version, self.resource_version
        if version.isdecimal() and known.isdecimal() and int(version) <= int(known):
            return False
        self.resource_version = version
        return True

    def _apply(self, type_: str, changed: T) -> bool:
        key = _key(changed.metadata)
        kept = None if type_ == "DELETED" else self._query.kept(changed)
        if kept is None:
            return self._objects.pop(key, None) is not None
        before = self._objects.get(key)
        self._objects[key] = kept
        return before is None or kept.differs(before)


def refusal(code: int, body: bytes, retry_after: str = "") -> ApiError:
    """Return the error for an HTTP response; `retry_after` is the header of that name."""
    try:
        message = _statuses.decode(body).message
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        message = body.decode(errors="replace")
    return error_of(code, message, float(retry_after) if retry_after.isdecimal() else 0.0)


def error_of(code: int, message: str, retry_after_s: float = 0.0) -> ApiError:
    """Return the error for an unsuccessful HTTP status, or the same in an event."""
    is_gone = code == GONE
    reason = "gone" if is_gone else f"status_{code}"
    return ApiError(reason, f"{code}: {message}", retry_after_s=retry_after_s, is_gone=is_gone)


def _key(metadata: Metadata) -> tuple[str, str]:
    return metadata.namespace, metadata.name
