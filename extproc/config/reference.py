"""The reference of the configuration file, generated from `extproc.config`."""

from __future__ import annotations

from inspect import cleandoc
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from extproc.config import Config
from extproc.config.base import Section, section_in

_HEAD = """# Configuration

One YAML file, given to `extproc serve --config FILE`. It is checked before anything starts, and
`extproc check-config --config FILE` does nothing else ([start](operate.md#start)). *Live*
fields take effect while the service runs, as soon as the file has changed and is valid. A file that
is not valid changes nothing and is logged. This page is generated from `extproc/config/` by
`scripts/gen-config-docs`.

A small file:

```yaml
server: {address: "0.0.0.0:9002"}
discovery: {static: ["10.0.0.7:8000", "10.0.0.8:8000"]}
policy: {name: founding, args: {threshold: 16}}
```
"""


_BOUNDS: dict[type, str] = {
    Ge: "at least {0.ge}",
    Gt: "more than {0.gt}",
    Le: "at most {0.le}",
    Lt: "less than {0.lt}",
    MinLen: "at least {0.min_length} entry",
    MaxLen: "at most {0.max_length} entries",
}
"""Constraints of a field in words."""


def render() -> str:
    """Return the whole page as Markdown."""
    parts = [_HEAD, "## (top level)\n", *_table(Config)]
    for name, field in Config.model_fields.items():
        section = section_in(field.annotation)
        if section is None:
            continue
        parts += _section(name, section)
    return "\n".join(parts) + "\n"


def _section(name: str, section: type[Section]) -> list[str]:
    """Return the text about a section and those in it."""
    heading = "#" * (2 + name.count("."))
    parts = [f"\n{heading} {name}\n", f"{cleandoc(str(section.__doc__))}\n", *_table(section)]
    for inner_name, field in section.model_fields.items():
        inner = section_in(field.annotation)
        if inner is not None:
            parts += _section(f"{name}.{inner_name}", inner)
    return parts


def _table(section: type[BaseModel]) -> list[str]:
    rows = ["| field | default | allowed | what for |", "|---|---|---|---|"]
    for name, field in section.model_fields.items():
        description = (field.description or "").replace("|", "\\|")
        rows.append(f"| `{name}` | {_default(field)} | {_allowed(field)} | {description} |")
    return rows


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default_factory is not None:
        return "see below" if section_in(field.annotation) else "`{}`"
    value = field.default
    if value is None or value is PydanticUndefined:
        return "none"
    if isinstance(value, tuple):
        return f"{len(value)} paths" if len(value) > 5 else f"`{list(value)}`"
    return f"`{value}`" if value != "" else "empty"


def _allowed(field: FieldInfo) -> str:
    literals = _literals(field.annotation)
    if literals:
        return ", ".join(f"`{value}`" for value in literals)
    words = [_bound(each) for each in field.metadata]
    return " and ".join(word for word in words if word)


def _bound(constraint: Any) -> str:
    """Return a constraint in words; "" for one that the description tells."""
    return _BOUNDS.get(type(constraint), "").format(constraint)


def _literals(annotation: Any) -> tuple[Any, ...]:
    """Return the values of the first Literal in an annotation, also inside unions."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return next((found for part in get_args(annotation) if (found := _literals(part))), ())
