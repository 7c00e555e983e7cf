"""What the configuration, a store and a cluster declare, as one."""

from __future__ import annotations

import pytest

from extproc.adapters.declared import AliasTarget, Declaration, DeclarationError, Terms
from extproc.config import Config
from extproc.config.configfile import check_sections
from extproc.config.configured import configured_adapters
from extproc.routing.conflicts import Merged
from extproc.routing.merging import Declaring


def declaring_of(config: Config, seen: list[Merged]) -> Declaring:
    return Declaring(configured_adapters(config), lambda merged, _withheld: seen.append(merged))


def test_what_would_lose_against_the_configuration_is_known_before_it_is_stored() -> None:
    route = {"name": "r", "models": ["sql"], "adapter": {"source": "/adapters/sql"}}
    seen: list[Merged] = []
    config = check_sections({"discovery": {"file": "pods.yaml"}, "routes": [route]})
    declaring = declaring_of(config, seen)
    names = ("sql", "sql@2", "SQL")
    list(declaring.store([Declaration(name, origin="store") for name in names]))

    assert [bool(declaring.why_not(Declaration(name))) for name in names] == [True, True, False]
    owners = {name: each.declaration.origin for name, each in seen[-1].offers.items()}
    assert owners == {"sql": "config", "SQL": "store"}


def test_with_roots_a_source_that_is_declared_over_http_is_in_one_of_them() -> None:
    roots = [{"pod": "/adapters/", "router": "/mnt"}, {"pod": "/more", "router": "/mnt"}]
    config = check_sections({"discovery": {"file": "pods.yaml"}, "adapters": {"roots": roots}})
    declaring = declaring_of(config, [])

    for source in ("/adapters/sql", "/more", "/more/a/b", "", "hf:org/sql"):
        assert declaring.why_not(Declaration("sql", source=source)) == ""
    for source in ("/etc", "/adapters2/sql", "/mor"):
        with pytest.raises(
            DeclarationError, match="must be in one of adapters.roots: /adapters, /"
        ):
            declaring.why_not(Declaration("sql", source=source))


def test_terms_that_a_store_has_count_as_those_of_the_configuration_do() -> None:
    seen: list[Merged] = []
    route = {"name": "r", "models": ["old", "law"], "targets": [{"model": "base"}]}
    config = check_sections({"discovery": {"file": "pods.yaml"}, "routes": [route]})
    declaring = declaring_of(config, seen)
    targets = (AliasTarget("sql", 9.0), AliasTarget("sql-2", 1.0))
    old = Declaration("old", origin="store", terms=Terms(targets=targets))
    list(
        declaring.store(
            [
                Declaration("sql", origin="store", terms=Terms(frozenset({"acme"}), 7)),
                Declaration("law", origin="store", terms=Terms(priority=8)),
                Declaration("expert", origin="store", terms=Terms(priority=3, targets=targets)),
                old,
            ]
        )
    )
    merged = seen[-1]

    assert merged.offers.keys() == {"sql", "law"}, "nothing is loaded for an alias"
    assert merged.offers["sql"].tenants == {"acme"}
    assert {route.models: route.priority for route in merged.routes} == {
        ("sql",): 7,
        ("expert",): 3,
    }
    assert [(rule.models, rule.targets) for rule in merged.rules] == [
        (("expert",), (("sql", 9.0), ("sql-2", 1.0)))
    ]
    assert "has targets" in declaring.why_not(old)


def test_an_adapters_name_is_no_alias_whoever_declares_it() -> None:
    seen: list[Merged] = []
    route = {"name": "r", "models": ["sql"], "adapter": {"source": "/adapters/sql"}}
    config = check_sections({"discovery": {"file": "pods.yaml"}, "routes": [route]})
    declaring = declaring_of(config, seen)
    alias = Declaration("sql", origin="store", terms=Terms(priority=1, targets=(AliasTarget("x"),)))
    list(declaring.store([alias]))

    assert declaring.why_not(alias) == "it is declared by the configuration"
    assert (seen[-1].rules, seen[-1].routes) == ((), ())


@pytest.mark.parametrize("fails_open", [True, False])
def test_what_is_for_some_tenants_alone_cannot_be_declared_where_envoy_fails_open(
    fails_open: bool,
) -> None:
    config = check_sections(
        {"discovery": {"file": "pods.yaml"}, "server": {"fail_open": fails_open}}
    )
    declaring = declaring_of(config, [])
    private = Declaration("law", source="/a", terms=Terms(frozenset({"acme"})))

    assert declaring.why_not(Declaration("law", source="/a")) == ""
    if fails_open:
        with pytest.raises(DeclarationError, match=r"no adapter is private here.*fail_open"):
            declaring.why_not(private)
    else:
        assert declaring.why_not(private) == ""
