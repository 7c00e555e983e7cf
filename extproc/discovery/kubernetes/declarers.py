"""The objects of a cluster that declare something: in which order, how large, and how many.

1. The oldest counts first; of one age, the first by namespace and name. That is the order of the
   Gateway API and of the inference extension.
2. An object that is being deleted declares nothing any more.
3. An object's own status says whatever is wrong with it. Of one that is of no pool of ours,
   the reason alone is kept.
4. Of a spec that is too long, or too much beside those of the older ones, its length and its
   adapter's name are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from extproc.discovery.kubernetes.objects import NO_VALUE, DeclaringObject, Withheld

MAX_OBJECTS = 10_000
"""Of one kind that count; the newest beyond are refused."""
MAX_SPEC_BYTES = 64 * 1024
MAX_SPECS_BYTES = 8 * 1024 * 1024
"""Of all of one kind that count: 10,000 of 800 bytes; the newest beyond are refused. Their values
take up to 25 times as much memory: many short names of tenants.
"""
MAX_STATUS_BYTES = 64 * 1024
"""A longer one is as none, and written anew."""
MAX_STATUSES_BYTES = 64 * 1024 * 1024
"""Of all of one kind: 10,000 of 6 KB; those of the newest beyond are as none."""

D = TypeVar("D", bound=DeclaringObject)
S = TypeVar("S")
T = TypeVar("T")


class DeclaredObject(Struct, Generic[T], frozen=True):
    """The contents of one object.

    Attributes:
        origin: Its name for people: `llmroute NAMESPACE/NAME`.
        generation: Of its spec.
        declared: None where there is a problem.
        problem: Why it cannot count; "" for none.
        ignored: The part without effect; "" for none.
        withheld: Name of the adapter that it is about, where it cannot count. Nobody gets that
            adapter then, as its owner is not known.
        is_ours: It is of a pool of ours; else `problem` says of which it is.
    """

    origin: str
    generation: int
    declared: T | None = None
    problem: str = ""
    ignored: str = ""
    withheld: str = ""
    is_ours: bool = True


class Declared(Generic[D, T]):
    """One kind of objects: the copies that are kept, and the contents of each.

    Of objects copies are kept, not the pages that they came in; each is read once, however often
    it is listed.

    Args:
        not_ours: Returns None of an object that is of a pool of ours. Of others, why it is not; ""
            where that is not to be said, and nothing kept.
        read: Returns an object's declarations, and the part without effect. Raises ValueError where
            it cannot count.
        named_in: Returns which adapter an object that cannot count is about, "" for none.
    """

    def __init__(
        self,
        not_ours: Callable[[D], str | None],
        read: Callable[[D], tuple[T, str]],
        named_in: Callable[[D], str] = lambda _: "",
    ) -> None:
        self._not_ours, self._read, self._named_in = not_ours, read, named_in
        self._known: dict[str, tuple[D, DeclaredObject[T]]] = {}

    def one(self, found: D) -> D | None:
        """Return what to keep of an object; None for nothing."""
        not_ours = self._not_ours(found)
        if not_ours == "":
            return None
        kept = replace(
            found,
            metadata=replace(found.metadata, labels=None),
            status=NO_VALUE if _num_bytes(found.status) > MAX_STATUS_BYTES else found.status.copy(),
            withheld=Withheld(not_ours=not_ours) if not_ours else None,
        )
        if not_ours:
            return replace(kept, spec=NO_VALUE)
        is_long = _num_bytes(found.spec) > MAX_SPEC_BYTES
        return self._without_spec(kept) if is_long else replace(kept, spec=found.spec.copy())

    def bound(self, objects: dict[tuple[str, str], D]) -> None:
        """Keep no specs, or statuses, of the newest until all are within their limit."""
        _shrink(
            objects,
            lambda each: _num_bytes(each.spec),
            self._without_spec,
            MAX_SPECS_BYTES,
        )
        _shrink(
            objects,
            lambda each: _num_bytes(each.status),
            lambda each: replace(each, status=NO_VALUE),
            MAX_STATUSES_BYTES,
        )

    def read(self, objects: Iterable[D]) -> list[DeclaredObject[T]]:
        """Return what those that are kept say, in the order in which they count; then others'."""
        known, self._known = self._known, {}
        readings: list[DeclaredObject[T]] = []
        not_ours: list[DeclaredObject[T]] = []
        total_bytes = 0
        living = [each for each in objects if not each.metadata.deletion_timestamp]
        for each in sorted(living, key=_age):
            withheld: Withheld | None = each.withheld
            if withheld is not None and withheld.not_ours:
                not_ours.append(_refused(each, withheld.not_ours, is_ours=False))
                continue
            num_bytes = _num_bytes(each.spec) if withheld is None else withheld.num_bytes
            if num_bytes <= MAX_SPEC_BYTES:
                total_bytes += num_bytes
            is_kept = withheld is None
            why = _why_refused(len(readings), total_bytes, num_bytes, is_kept=is_kept)
            if why:
                named = self._named_in(each) if withheld is None else withheld.named
                readings.append(_refused(each, why, named))
            else:
                readings.append(self._known_of(each, known))
        return readings + not_ours[:MAX_OBJECTS]

    def _without_spec(self, each: D) -> D:
        withheld: Withheld = each.withheld or Withheld(_num_bytes(each.spec), self._named_in(each))
        return replace(each, spec=NO_VALUE, withheld=withheld)

    def _known_of(
        self, each: D, known: Mapping[str, tuple[D, DeclaredObject[T]]]
    ) -> DeclaredObject[T]:
        origin = origin_of(each)
        before = known.get(origin)
        is_known = before is not None and not each.differs(before[0])
        reading = before[1] if before is not None and is_known else self._reading(each, origin)
        self._known[origin] = each, reading
        return reading

    def _reading(self, each: D, origin: str) -> DeclaredObject[T]:
        try:
            declared, ignored = self._read(each)
        except ValueError as error:
            return _refused(each, str(error), self._named_in(each))
        return DeclaredObject(origin, each.metadata.generation, declared, ignored=ignored)


def origin_of(declaring: DeclaringObject) -> str:
    """Return what people know an object by."""
    kind = type(declaring).__name__.lower()
    return f"{kind} {declaring.metadata.namespace}/{declaring.metadata.name}"


def decode_spec(declaring: DeclaringObject, decoder: msgspec.json.Decoder[S]) -> S:
    """Decode a spec.

    Raises:
        ValueError: It is none, or longer than `MAX_SPEC_BYTES`.
    """
    if why := _too_long(_num_bytes(declaring.spec)):
        raise ValueError(why)
    try:
        return decoder.decode(declaring.spec)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"spec: {error}") from error


def _refused(
    each: DeclaringObject, why: str, named: str = "", *, is_ours: bool = True
) -> DeclaredObject[Any]:
    origin, generation = origin_of(each), each.metadata.generation
    return DeclaredObject(origin, generation, problem=why, withheld=named, is_ours=is_ours)


def _shrink(
    objects: dict[tuple[str, str], D],
    num_bytes_of: Callable[[D], int],
    shrunk: Callable[[D], D],
    max_bytes: int,
) -> None:
    """Shrink the newest objects until all are within a limit."""
    total_bytes = sum(map(num_bytes_of, objects.values()))
    if total_bytes <= max_bytes:
        return
    for key, each in sorted(objects.items(), key=lambda item: _age(item[1]), reverse=True):
        if total_bytes > max_bytes:
            objects[key] = shrunk(each)
            total_bytes += num_bytes_of(objects[key]) - num_bytes_of(each)


def _why_refused(num_older: int, total_bytes: int, num_bytes: int, *, is_kept: bool) -> str:
    """Return why an object cannot count beside those before it; "" where it can be read."""
    if num_older >= MAX_OBJECTS:
        return f"there are {MAX_OBJECTS} older ones, the most allowed"
    if num_bytes <= MAX_SPEC_BYTES and total_bytes > MAX_SPECS_BYTES:
        return f"spec: {total_bytes} bytes together with the older ones; allowed: {MAX_SPECS_BYTES}"
    if is_kept:
        return ""  # one that is too long is refused where it is read
    return _too_long(num_bytes) or "spec: the older ones leave no room; it is read at the next list"


def _too_long(num_bytes: int) -> str:
    is_too_long = num_bytes > MAX_SPEC_BYTES
    return f"spec: {num_bytes} bytes; allowed: {MAX_SPEC_BYTES}" if is_too_long else ""


def _num_bytes(raw: Raw) -> int:
    return memoryview(raw).nbytes


def _age(each: DeclaringObject) -> tuple[str, str, str]:
    """Return what the oldest has least of."""
    metadata = each.metadata
    return metadata.creation_timestamp or "", metadata.namespace, metadata.name
