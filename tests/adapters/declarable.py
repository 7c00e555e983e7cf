"""What may be declared of an adapter, and what may not: fields as clients write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Fields = Mapping[str, Any]

NAME = "name of at most 256 bytes, without control characters"
PRINTABLE = "of printable characters"
DIRECTORY = "must be the absolute path of a directory below /, without .."
HUB = "must be hf:ORG/REPO"
REVISION = "no engine takes a revision"
OTHER = "must be another model than the adapter itself"

GOOD: list[Fields] = [
    {"name": "sql"},
    {"name": "SQL"},
    {"name": "acme/sql model"},
    {"name": "ü" * 128},
    {"name": "sql@2"},
    {"name": "sql", "source": "/adapters/sql"},
    {"name": "sql", "source": "/" + "s" * 1023},
    {"name": "sql", "source": "/ädapters/my sql/..."},
    {"name": "sql", "source": "//adapters/./sql/"},
    {"name": "sql", "source": "hf:org/repo"},
    {"name": "sql", "version": "2026-11-25", "base": "meta-llama/Llama-3.1-8B", "rank": 512},
    {"name": "a" * 192, "version": "v" * 63},
    {"name": "sql", "replicas": {"min": 0}},
    {"name": "sql", "replicas": {"min": 1024, "max": 1024}},
    {"name": "sql", "load": "lazy"},
]
BAD: list[tuple[Fields, str, str]] = [
    # Fields, the reason, and the same in the words of a schema, where that comes first.
    ({"name": ""}, NAME, "at least 1 char"),
    ({"name": "a,b"}, NAME, ""),
    ({"name": "a*"}, NAME, ""),
    ({"name": "*"}, NAME, ""),
    ({"name": " a"}, NAME, ""),
    ({"name": "a\u00a0"}, NAME, ""),
    ({"name": "a\n"}, NAME, ""),
    ({"name": "a\x7fb"}, NAME, ""),
    ({"name": "a\x85b"}, NAME, ""),
    ({"name": "ü" * 129}, NAME, ""),
    ({"name": "a", "base": "a,b"}, NAME, ""),
    ({"name": "a", "base": "b\x00"}, NAME, ""),
    ({"name": "a", "base": "a"}, OTHER, ""),
    ({"name": "a", "version": "@"}, "must be letters, digits", "should match"),
    ({"name": "a", "version": "1\n"}, "must be letters, digits", "should match"),
    ({"name": "a", "version": "v" * 64}, "must be letters, digits", "Too long"),
    ({"name": "a" * 193, "version": "v" * 63}, "NAME@VERSION must have at most 256 bytes", ""),
    ({"name": "a", "source": "/"}, DIRECTORY, ""),
    ({"name": "a", "source": "//./"}, DIRECTORY, ""),
    ({"name": "a", "source": "/adapters/../etc"}, DIRECTORY, ""),
    ({"name": "a", "source": "/adapters/.."}, DIRECTORY, ""),
    ({"name": "a", "source": "/adapters/\x07"}, PRINTABLE, ""),
    ({"name": "a", "source": "/adapters/\u202egnp"}, PRINTABLE, ""),
    ({"name": "a", "source": "/adapters/\u2028"}, PRINTABLE, ""),
    ({"name": "a", "source": "/adapters/\u00a0"}, PRINTABLE, ""),
    ({"name": "a", "source": "/" + "s" * 1024}, "at most 1024 bytes", "Too long"),
    ({"name": "a", "source": "/" + "ü" * 512}, "at most 1024 bytes", ""),
    ({"name": "a", "source": "adapters/a"}, "must be an absolute path, or hf:ORG/REPO", ""),
    ({"name": "a", "source": "s3://bucket/a"}, "is not fetched here", ""),
    ({"name": "a", "source": "https://host/a.tar.gz"}, "is not fetched here", ""),
    ({"name": "a", "source": "hf:only-org"}, HUB, ""),
    ({"name": "a", "source": "hf:o/r@v1"}, REVISION, ""),
    ({"name": "a", "source": "hf:o/r@../../x"}, REVISION, ""),
    ({"name": "a", "source": "hf:o/r..x"}, HUB, ""),
    ({"name": "a", "rank": 0}, "must be from 1 to 512", "greater than or equal to 1"),
    ({"name": "a", "rank": 513}, "must be from 1 to 512", "less than or equal to 512"),
    ({"name": "a", "replicas": {"min": -1}}, "must be from 0 to 1024", "equal to 0"),
    ({"name": "a", "replicas": {"min": 1025}}, "must be from 0 to 1024", "equal to 1024"),
    ({"name": "a", "replicas": {"min": 0, "max": 0}}, "must be from 1 to 1024", "equal to 1"),
    ({"name": "a", "replicas": {"max": 1025}}, "must be from 1 to 1024", "equal to 1024"),
    ({"name": "a", "replicas": {"min": 3, "max": 2}}, "must be at least min", ""),
]
BAD_FALLBACKS = [("a,b", NAME), (" b", NAME), ("b\x01", NAME), ("*", NAME), ("a", OTHER)]
"""Of an adapter `a`: LLMRoutes alone have one."""
