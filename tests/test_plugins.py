"""A policy is found by its name, wherever it is, or the message says why not."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from extproc.plugins import GROUP, PolicyError, load_policy
from extproc.routing.policies import BUILT_IN, Founding
from extproc.types import Choice, RequestInfo, Snapshot, Wait
from tests.builders import endpoint_view, request, snapshot


class Last:
    """A user's policy: the last endpoint, or the one `back` before it."""

    def __init__(self, back: int = 0) -> None:
        if back == -2:
            raise LookupError
        if back < 0:
            raise LookupError("back is negative")
        self.back = back

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Choice:
        return Choice(snapshot.endpoints[-1 - self.back :][:1], "last")


def shifted(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that takes an argument of its own: `shift`, which it adds to `back`."""

    @functools.wraps(function)
    def with_shift(*args: Any, shift: int = 0, back: int = 0, **others: Any) -> Any:
        return function(*args, back=back + shift, **others)

    return with_shift


decorated = shifted(Last)


class DecoratedInit(Last):
    """The same for `__init__`."""

    __init__ = shifted(Last.__init__)


class _Unresolved(type):
    @property
    def __signature__(cls) -> NoReturn:
        """What Python 3.14 does for annotations under `TYPE_CHECKING`."""
        raise NameError("name 'Snapshot' is not defined")


class ForTypeCheckers(Last, metaclass=_Unresolved):
    """Its signature cannot be told."""


class Outer:
    """A place for a policy."""

    Inner = Last


NOT_A_POLICY = dict


class Positional(Last):
    """Takes `rng` by position alone."""

    def choose(self, snapshot: Snapshot, request: RequestInfo, rng: Any, /) -> Choice:  # type: ignore[override]
        raise AssertionError


class Asynchronous(Last):
    """Its choice has to be awaited."""

    async def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: Any) -> Choice:  # type: ignore[override]
        raise AssertionError


class Address(Last):
    """Returns an address."""

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: Any) -> str:  # type: ignore[override]
        return snapshot.endpoints[0].address


class Nobody(Last):
    """Chooses no endpoint."""

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: Any) -> Choice:
        return Choice(())


class BaseFails(Last):
    """Knows adapters alone."""

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: Any) -> Choice:
        if request.adapter is None:
            raise LookupError("which tenant?")
        return Choice(snapshot.endpoints)


class Exits(Last):
    """Ends the process when it chooses."""

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: Any) -> Choice:
        sys.exit(3)


class ExitsAtOnce(Last):
    """Ends the process when it is made."""

    def __init__(self) -> None:
        sys.exit("no licence")


class Wordless(Exception):
    """An error whose text is a bug of its own."""

    def __str__(self) -> str:
        raise LookupError


class RaisesWordless(Last):
    """Raises one."""

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: Any) -> Choice:
        raise Wordless


class Hasty(Last):
    """Has no number for the time that it wants."""

    ttft_s = "soon"


class Patient(Last):
    """Always waits."""

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: Any) -> Wait:  # type: ignore[override]
        return Wait(1.0)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_a_built_in_policy_is_found_by_its_name(name: str) -> None:
    assert isinstance(load_policy(name, {}), BUILT_IN[name])


def test_arguments_are_those_of_the_policy() -> None:
    policy = load_policy("founding", {"threshold": 3})

    assert isinstance(policy, Founding)
    assert policy.threshold == 3


@pytest.mark.parametrize("name", [f"{__name__}:Last", f"{__name__}:Outer.Inner"])
def test_a_user_s_policy_is_found_by_module_and_attribute(name: str) -> None:
    policy = load_policy(name, {"back": 1})
    views = snapshot(endpoint_view(1), endpoint_view(2))

    choice = policy.choose(views, request(), rng=random.Random(0))

    assert isinstance(choice, Choice)
    assert choice.endpoints == (views.endpoints[0],)


@pytest.mark.parametrize("name", ["decorated", "DecoratedInit"])
def test_a_decorator_may_take_arguments_of_its_own(name: str) -> None:
    policy = load_policy(f"{__name__}:{name}", {"shift": 1, "back": 1})

    assert isinstance(policy, Last)
    assert policy.back == 2


def test_a_policy_without_a_signature_takes_its_arguments() -> None:
    policy = load_policy(f"{__name__}:ForTypeCheckers", {"back": 1})

    assert isinstance(policy, ForTypeCheckers)


def test_a_policy_may_wait() -> None:
    assert isinstance(load_policy(f"{__name__}:Patient", {}), Patient)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution that offers two policies, one of which cannot be imported."""
    (tmp_path / "acme_policies.py").write_text(
        "class Custom:\n"
        "    def choose(self, snapshot, request, *, rng):\n"
        "        from extproc import Choice\n"
        "        return Choice(snapshot.endpoints)\n"
    )
    info = tmp_path / "acme_policies-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-policies\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{GROUP}]\nsomebodys = acme_policies:Custom\nbroken = acme_policies:Gone\n"
        "founding = acme_policies:Custom\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("installed")
def test_an_installed_policy_is_found_by_its_entry_point() -> None:
    assert type(load_policy("somebodys", {})).__module__ == "acme_policies"


@pytest.mark.usefixtures("installed")
def test_nobody_can_take_the_name_of_a_built_in_policy() -> None:
    assert isinstance(load_policy("founding", {}), Founding)


@pytest.mark.usefixtures("installed")
def test_an_entry_point_that_leads_nowhere_is_reported() -> None:
    with pytest.raises(PolicyError, match="policy broken: cannot be imported: .*Gone"):
        load_policy("broken", {})


def test_a_module_that_ends_the_process_is_reported_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme_script.py").write_text("import sys\nsys.exit(2)\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    with pytest.raises(PolicyError, match="acme_script:Own: cannot be imported: SystemExit 2"):
        load_policy("acme_script:Own", {})


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("nope", {}, f"policy nope: unknown; allowed: {', '.join(sorted(BUILT_IN))}"),
        ("nope", {}, f"an entry point in {GROUP}, module:attribute"),
        ("founding", {"threshold": 0}, "policy founding: threshold is 0; allowed: 1 or more"),
        ("founding", {"treshold": 1}, "policy founding: args: treshold: unknown; allowed: thresh"),
        ("random", {"threshold": 1}, "policy random: args: threshold: unknown; allowed: none"),
        (
            "no.such.module:Custom",
            {},
            "No module named 'no'; install it, or name its folder in PYTHONPATH",
        ),
        (f"{__name__}:Missing", {}, "cannot be imported: .*Missing"),
        (f"{__name__}:", {}, "cannot be imported"),
        (":Custom", {}, "cannot be imported"),
        (f"{__name__}:Last", {"back": -1}, "back is negative"),
        (f"{__name__}:Last", {"back": -2}, "Last: LookupError"),
        (f"{__name__}:Last", {"bakc": 1}, "Last: args: bakc: unknown; allowed: back"),
        (f"{__name__}:decorated", {"shift": 1, "bakc": 1}, "unexpected keyword argument 'bakc'"),
        (f"{__name__}:ForTypeCheckers", {"bakc": 1}, "unexpected keyword argument 'bakc'"),
        (f"{__name__}:NOT_A_POLICY", {}, r"has no method choose\(snapshot, request, \*, rng\)"),
        (f"{__name__}:__doc__", {}, "not callable"),
        (f"{__name__}:Positional", {}, "choose raised TypeError: .*rng"),
        (f"{__name__}:Asynchronous", {}, "choose is asynchronous; it has to be a plain method"),
        (f"{__name__}:Address", {}, "choose returned str; allowed: Choice, Wait"),
        (f"{__name__}:Nobody", {}, "choose returned no endpoints of its snapshot"),
        (f"{__name__}:Exits", {}, "choose raised SystemExit: 3"),
        (f"{__name__}:ExitsAtOnce", {}, "ExitsAtOnce: SystemExit no licence"),
        (f"{__name__}:RaisesWordless", {}, "choose raised Wordless: "),
        (f"{__name__}:Hasty", {}, "ttft_s is 'soon'; allowed: seconds above 0, or None"),
        (f"{__name__}:BaseFails", {}, r"raised LookupError: which tenant\? \(.*test_plugins.py:"),
    ],
)
def test_what_cannot_be_loaded_is_reported_with_what_is_allowed(
    name: str, args: dict[str, int], message: str
) -> None:
    with pytest.raises(PolicyError, match=message):
        load_policy(name, args)
