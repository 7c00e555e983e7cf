"""The reference of the configuration file, written from `extproc.config` itself."""

from __future__ import annotations

import types
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from extproc.config import Config

_HEAD = """# Configuration

One YAML file, given to `extproc serve --config FILE`. It is checked before anything starts, and
`extproc check-config --config FILE` does nothing else ([operations](operations.md#start)). *Live*
fields take effect while the service runs, as soon as the file has changed and is valid; a file that
is not valid changes nothing and is logged. This page is generated from `extproc/config/` by
`scripts/gen-config-docs`.

A small file:

```yaml
server: {address: "0.0.0.0:9002"}
discovery: {static: ["10.0.0.7:8000", "10.0.0.8:8000"]}
policy: {name: founding, args: {threshold: 16}}
```
"""


def render() -> str:
    """The whole page as Markdown."""
    parts = [_HEAD, "## (top level)\n", *_table(Config)]
    for name, field in Config.model_fields.items():
        section = _section(field)
        if section is not None:
            parts += [f"\n## {name}\n", f"{section.__doc__}\n", *_table(section)]
            parts += _nested(name, section)
    return "\n".join(parts) + "\n"


def _nested(name: str, section: type[BaseModel]) -> list[str]:
    parts: list[str] = []
    for field_name, field in section.model_fields.items():
        inner = _section(field)
        if inner is not None:
            parts += [f"\n### {name}.{field_name}\n", f"{inner.__doc__}\n", *_table(inner)]
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
        return "see below" if _section(field) else "`{}`"
    value = field.default
    if value is None or value is PydanticUndefined:
        return "none"
    if isinstance(value, tuple):
        return f"{len(value)} paths" if len(value) > 4 else f"`{list(value)}`"
    return f"`{value}`" if value != "" else "empty"


def _allowed(field: FieldInfo) -> str:
    literals = _literals(field.annotation)
    if literals:
        return ", ".join(f"`{value}`" for value in literals)
    words = [_bound(each) for each in field.metadata]
    return " and ".join(word for word in words if word)


def _bound(constraint: Any) -> str:
    match constraint:
        case Ge(ge=bound):
            return f"at least {bound}"
        case Gt(gt=bound):
            return f"more than {bound}"
        case Le(le=bound):
            return f"at most {bound}"
        case Lt(lt=bound):
            return f"less than {bound}"
        case MinLen(min_length=length):
            return f"at least {length} entry"
        case _:
            return ""


def _literals(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    for part in _parts(annotation):
        if get_origin(part) is Literal:
            return get_args(part)
    return ()


def _section(field: FieldInfo) -> type[BaseModel] | None:
    for part in (field.annotation, *_parts(field.annotation)):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part
    return None


def _parts(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return ()
