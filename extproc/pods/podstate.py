"""One pod, as those see it who load adapters, and what its engine's version says of loads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from math import inf
from types import MappingProxyType

from msgspec import Struct

from extproc.types import ModelCard

_NOTHING: Mapping[str, int] = MappingProxyType({})


class PodState(Struct, frozen=True):
    """The known state of one pod.

    Attributes:
        is_up: It answers its health check, is not ejected, and is not leaving.
        models: As `/v1/models` lists them, by name; None before the first listing. The same object
            as long as nothing changes.
        listed_at_s: When that listing was asked for.
        max_loras: Adapter slots on the GPU; None for unknown, as in the next two.
        max_cpu_loras: Adapters in its host memory, those in slots included.
        max_rank: The largest rank that it loads.
        num_pending: Unfinished requests, of all routers.
        pending_by_adapter: The same by served name; only adapters with requests appear.
        process: When its process started; None where unknown.
        is_resolver: It finds and loads by itself the adapter that a request names.
        pools: Names of the pools that it is in, where there are several.
        unsafe_version: Of its engine, where a load would change the weights of running requests;
            "" where it would not.
    """

    address: str
    is_up: bool = True
    models: Mapping[str, ModelCard] | None = None
    listed_at_s: float = -inf
    max_loras: int | None = None
    max_cpu_loras: int | None = None
    max_rank: int | None = None
    num_pending: int = 0
    pending_by_adapter: Mapping[str, int] = _NOTHING
    process: float | None = None
    is_resolver: bool = False
    pools: frozenset[str] = frozenset()
    unsafe_version: str = ""

    @property
    def why_no_load(self) -> str:
        """Why nothing can be loaded there now: "" for no reason."""
        if not (self.unsafe_version and self.num_pending):
            return ""
        return (
            f"its engine, {self.unsafe_version}, would answer running requests with another "
            "adapter's weights: upgrade it, or allow it by adapters.allow_unsafe_versions"
        )


# Facts about engines by their versions.

_RELEASE = re.compile(r"v?(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?", re.ASCII)


@lru_cache(256)  # asked at each report; as many versions as a fleet may have
def release_of(version: str) -> tuple[int, int, int] | None:
    """Return the release that a version's text begins with; None where it has none.

    A suffix (`.post2`, `rc1`, `.dev3+g1a2b3c4`) is left out: a build before a release is taken for
    that release.
    """
    found = _RELEASE.match(version)
    return None if found is None else (int(found[1]), int(found[2]), int(found[3] or 0))


def mixes_weights(version: str, safe_since: tuple[int, int, int] | None) -> bool:
    """Return whether a load of an adapter may change the weights of running requests there.

    Args:
        safe_since: The first release where it does not; None for any. A version that is unknown, or
            a build of no release (0.1.dev, as vLLM names those without its tags), is trusted.
    """
    release = release_of(version)
    return safe_since is not None and release is not None and (0, 2) <= release < safe_since
