"""The objects of a cluster that declare something: in which order, how large, and how many.

1. The oldest counts first; of one age, the first by namespace and name. That is the order of the
   Gateway API and of the inference extension.
2. An object that is being deleted declares nothing any more.
3. An object that is of no pool of ours is nobody's problem here. Of one that is, whatever is wrong
   is said in its own status.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from extproc.core.kubernetes.objects import DeclaringObject

MAX_OBJECTS = 10_000
"""Of one kind that count; the newest beyond are refused."""
MAX_SPEC_BYTES = 64 * 1024

D = TypeVar("D", bound=DeclaringObject)
S = TypeVar("S")
T = TypeVar("T")


class Reading(Struct, Generic[T], frozen=True):
    """What one object says.

    Attributes:
        origin: What people know it by: `llmroute NAMESPACE/NAME`.
        generation: Of its spec.
        declared: None where there is a problem.
        problem: Why it cannot count; "" for none.
        ignored: What of it has no effect; "" for nothing.
        withheld: Name of the adapter that it is about, where it cannot count: nobody is to get
            that instead, as nobody knows whose it is.
    """

    origin: str
    generation: int
    declared: T | None = None
    problem: str = ""
    ignored: str = ""
    withheld: str = ""


class Reader(Generic[D, T]):
    """Reads each object once, however often it is listed.

    Args:
        read: Returns what an object declares, and what of it has no effect; None where it is not
            ours. Raises ValueError where it cannot count.
        named_in: Returns which adapter an object that cannot count is about, "" for none.
    """

    def __init__(
        self,
        read: Callable[[D], tuple[T, str] | None],
        named_in: Callable[[D], str] = lambda _: "",
    ) -> None:
        self._read, self._named_in = read, named_in
        self._known: dict[str, tuple[D, Reading[T] | None]] = {}

    def read(self, objects: Iterable[D]) -> list[Reading[T]]:
        """Return what those of our pools say, in the order in which they count."""
        known, self._known = self._known, {}
        readings = []
        for each in _oldest_first(objects):
            origin = origin_of(each)
            before, reading = known.get(origin, (None, None))
            if before is None or each.differs(before):
                reading = self._reading(each, origin)
            self._known[origin] = each, reading
            if reading is not None:
                readings.append((each, reading))
        why = f"there are {MAX_OBJECTS} older ones; allowed: so many"
        late = [
            replace(reading, declared=None, problem=why, withheld=self._named_in(each))
            for each, reading in readings[MAX_OBJECTS:]
        ]
        return [reading for _, reading in readings[:MAX_OBJECTS]] + late

    def _reading(self, each: D, origin: str) -> Reading[T] | None:
        generation = each.metadata.generation
        try:
            found = self._read(each)
        except ValueError as error:
            return Reading(origin, generation, problem=str(error), withheld=self._named_in(each))
        return None if found is None else Reading(origin, generation, found[0], ignored=found[1])


def origin_of(declaring: DeclaringObject) -> str:
    """Return what people know an object by."""
    kind = type(declaring).__name__.lower()
    return f"{kind} {declaring.metadata.namespace}/{declaring.metadata.name}"


def decode_spec(declaring: DeclaringObject, decoder: msgspec.json.Decoder[S]) -> S:
    """Decode a spec.

    Raises:
        ValueError: It is none, or longer than `MAX_SPEC_BYTES`.
    """
    spec = memoryview(declaring.spec)
    if spec.nbytes > MAX_SPEC_BYTES:
        raise ValueError(f"spec: {spec.nbytes} bytes; allowed: {MAX_SPEC_BYTES}")
    try:
        return decoder.decode(spec)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"spec: {error}") from error


def _oldest_first(objects: Iterable[D]) -> list[D]:
    def age(each: D) -> tuple[str, str, str]:
        metadata = each.metadata
        return metadata.creation_timestamp or "", metadata.namespace, metadata.name

    return sorted((each for each in objects if not each.metadata.deletion_timestamp), key=age)
