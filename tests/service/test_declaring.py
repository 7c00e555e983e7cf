"""What the configuration, a store and a cluster declare, as one."""

from __future__ import annotations

import pytest

from extproc.adapters.declared import Declaration, DeclarationError
from extproc.config.file import check_sections
from extproc.routing.precedence import Merged
from extproc.service.adapterservice import Declaring


def test_what_would_lose_against_the_configuration_is_known_before_it_is_stored() -> None:
    route = {"name": "r", "models": ["sql"], "adapter": {"source": "/adapters/sql"}}
    seen: list[Merged] = []
    config = check_sections({"discovery": {"file": "pods.yaml"}, "routes": [route]})
    declaring = Declaring(config, lambda merged, _withheld: seen.append(merged))
    names = ("sql", "sql@2", "SQL")
    declaring.store([Declaration(name, origin="store") for name in names])

    assert [bool(declaring.why_not(Declaration(name))) for name in names] == [True, True, False]
    owners = {name: each.declaration.origin for name, each in seen[-1].offers.items()}
    assert owners == {"sql": "config", "SQL": "store"}


def test_with_roots_a_source_that_is_declared_over_http_is_in_one_of_them() -> None:
    roots = [{"pod": "/adapters/", "router": "/mnt"}, {"pod": "/more", "router": "/mnt"}]
    config = check_sections({"discovery": {"file": "pods.yaml"}, "adapters": {"roots": roots}})
    declaring = Declaring(config, lambda _merged, _withheld: None)

    for source in ("/adapters/sql", "/more", "/more/a/b", "", "hf:org/sql"):
        assert declaring.why_not(Declaration("sql", source=source)) == ""
    for source in ("/etc", "/adapters2/sql", "/mor"):
        with pytest.raises(
            DeclarationError, match="must be in one of adapters.roots: /adapters, /"
        ):
            declaring.why_not(Declaration("sql", source=source))
