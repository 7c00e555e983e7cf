"""Pages that stand alone, from templates that lie beside the code that fills them.

Nothing is fetched: charts are inline SVG. A page follows the reader's choice of a light or a dark
screen.
"""

from __future__ import annotations

from pathlib import Path

from extproc.sim.opponents.descriptions import DESCRIPTIONS

_HERE = Path(__file__).parent


class PageError(ValueError):
    """A page cannot be made here; the message says why."""


def check_libraries() -> None:
    """Look for what pages are made with, before work is spent on one.

    Raises:
        PageError: Something is not installed.
    """
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise PageError("a page needs `pip install 'lora-extproc[loadtest]'`") from error


def rendered(template: Path, **values: object) -> str:
    """A page from a template, which may extend `base.html`; what it shows is escaped."""
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
    """A policy in a line, for people who have not read its source."""
    return DESCRIPTIONS.get(label.partition("?")[0], "yours")
