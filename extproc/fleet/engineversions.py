"""What is known of engines by their versions."""

from __future__ import annotations

import re

_RELEASE = re.compile(r"v?(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?", re.ASCII)


def release_of(version: str) -> tuple[int, int, int] | None:
    """Return the release that a version's text begins with; None where it has none.

    What stands after it (`.post2`, `rc1`, `.dev3+g1a2b3c4`) is left out: a build before a release
    is taken for that release.
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
