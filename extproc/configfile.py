"""Reads the configuration file, and says in words what is wrong with it. Part of `app`."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, Protocol

import yaml
from pydantic import BaseModel, ValidationError

from extproc.config import Config


class ConfigError(Exception):
    """The file cannot be used; the message says where and what is allowed, a line per mistake."""


class ConfigParser(Protocol):
    """What makes a configuration of a file's text, as `parse_config` does."""

    def __call__(self, text: str, *, source: str) -> Config:
        """Raise `ConfigError` if it cannot."""


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice: the first would silently not count."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def parse_config(text: str, *, source: str = "configuration") -> Config:
    """Read a configuration.

    Raises:
        ConfigError: A line for each mistake: path, value and what is allowed.
    """
    return check_sections(read_sections(text, source=source), source=source)


def read_sections(text: str, *, source: str = "configuration") -> dict[str, Any]:
    """Read the file's sections, unchecked.

    Raises:
        ConfigError: It is not a mapping in YAML.
    """
    try:
        data = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # 2024-13-45 is a ValueError
        raise ConfigError(f"{source}: not YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: must be a mapping of sections, got {type(data).__name__}")
    return data


def check_sections(data: Mapping[str, Any], *, source: str = "configuration") -> Config:
    """Check the sections of a configuration.

    Raises:
        ConfigError: A line for each mistake: path, value and what is allowed.
    """
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        lines = [f"{source}: {_describe(item)}" for item in error.errors()]
        raise ConfigError("\n".join(lines)) from error


def load_config(path: Path) -> Config:
    """Read a configuration file.

    Raises:
        ConfigError: It cannot be read, or as `parse_config`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    return parse_config(text, source=str(path))


def _describe(item: Any) -> str:
    where = ".".join(str(part) for part in item["loc"]) or "(top level)"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        return f"{where}: unknown; allowed: {', '.join(_allowed_beside(item['loc']))}"
    if item["type"] == "missing" or not item["loc"]:
        return f"{where}: {message}"
    return f"{where}: {item['input']!r}: {message}"


def _allowed_beside(location: tuple[int | str, ...]) -> list[str]:
    """The names that may stand where an unknown one does."""
    section: Any = Config
    for part in location[:-1]:
        if isinstance(part, str):
            section = _section_in(section.model_fields[part].annotation)
    return list(section.model_fields)


def _section_in(annotation: Any) -> Any:
    """The section that an annotation names, inside of unions and tuples, too."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    parts = getattr(annotation, "__args__", ())
    return next((found for part in parts if (found := _section_in(part))), None)
