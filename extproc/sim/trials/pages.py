"""Self-contained pages from templates, with charts as inline SVG, for light and dark screens."""

from __future__ import annotations

from pathlib import Path

from extproc.core.errors import needs_extra
from extproc.sim.opponents.descriptions import DESCRIPTIONS

_HERE = Path(__file__).parent


class PageError(ValueError):
    """A page cannot be rendered here."""


def check_libraries() -> None:
    """Raise PageError if the libraries for pages are not installed."""
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise PageError(needs_extra("a page", "loadtest", error)) from error


def rendered(template: Path, **values: object) -> str:
    """Render a template, which may extend `base.html`, with escaping."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader([template.parent, _HERE]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["svg"] = Markup
    environment.globals["describe"] = describe
    return environment.get_template(template.name).render(values)


def describe(label: str) -> str:
    """Return a description of a policy in one line."""
    return DESCRIPTIONS.get(label.partition("?")[0], "yours")
