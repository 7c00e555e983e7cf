"""What may be declared."""

from __future__ import annotations

import pytest

from extproc.core.adapters.declared import Declaration, DeclarationError, is_version_of

GOOD = [
    Declaration("sql"),
    Declaration("acme/sql", "/adapters/sql", "2", "llama", 16, 2, 4),
    Declaration("sql", "hf:acme/sql"),
    Declaration("sql", "hf:acme/sql", min_replicas=0),
]
BAD = [
    (Declaration(""), "name"),
    (Declaration("a,b"), "comma"),
    (Declaration(" a"), "blanks"),
    (Declaration("a\n"), "name"),
    (Declaration("a", version="@"), "version"),
    (Declaration("a" * 250, version="1234567"), "longer than 256 bytes"),
    (Declaration("a", "relative/path"), "absolute path"),
    (Declaration("a", "/adapters/../etc"), "plain"),
    (Declaration("a", "/adapters/\n"), "plain"),
    (Declaration("a", "hf:only-org"), "hf:ORG/REPO"),
    (Declaration("a", "hf:acme/sql@v1.0"), "no engine takes a revision"),
    (Declaration("a", "hf:acme/sql@../../x"), "no engine takes a revision"),
    (Declaration("a", "s3://bucket/a"), "s3 is not fetched here"),
    (Declaration("a", "https://host/a.tar.gz"), "mount"),
    (Declaration("a", rank=0), "rank"),
    (Declaration("a", rank=513), "rank"),
    (Declaration("a", min_replicas=-1), "min"),
    (Declaration("a", min_replicas=3, max_replicas=2), "at least min"),
    (Declaration("a", min_replicas=0, max_replicas=0), "at least 1"),
]


@pytest.mark.parametrize("declaration", GOOD)
def test_a_declaration_that_pods_can_serve_stands(declaration: Declaration) -> None:
    declaration.check()


@pytest.mark.parametrize(("declaration", "why"), BAD)
def test_a_declaration_that_no_pod_can_serve_is_refused_and_told_why(
    declaration: Declaration, why: str
) -> None:
    with pytest.raises(DeclarationError, match=why):
        declaration.check()


def test_pods_have_a_version_under_a_name_of_its_own() -> None:
    assert Declaration("sql").served_name == "sql"
    assert Declaration("sql", version="2").served_name == "sql@2"


def test_every_version_of_an_adapter_is_known_by_its_name() -> None:
    assert is_version_of("sql", "sql")
    assert is_version_of("sql@1", "sql")
    assert not is_version_of("sql2", "sql")
