"""Reads the configuration file and describes its mistakes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from extproc.config import Config
from extproc.config.base import section_in
from extproc.files.reading import describe_failure, read_text
from extproc.files.yamltext import YamlError, load_yaml

MAX_MISTAKES = 50
"""Reported in full; further ones are only counted."""
_EACH_DECIDES = "each router decides by itself, by the messages of all routers"
REMOVED = {"peers.lead": _EACH_DECIDES, "peers.lead_timeout_s": _EACH_DECIDES}
"""Settings of before, and what to do without them."""
_MAX_SHOWN_CHARS = 200
"""Of a wrong value in a message."""
_PLAIN = {
    "dict_type": "must be a mapping",
    "tuple_type": "must be a list",
    "string_type": "must be text",
    "path_type": "must be a path",
}
"""The allowed values in words, by the kind of pydantic's error, where its own message is about
Python.
"""


class ConfigError(Exception):
    """The file cannot be used; the message says where and what is allowed, a line per mistake."""


@contextmanager
def usable(field: str, path: Path | None = None) -> Iterator[None]:
    """Have it said which field is wrong where its file cannot be used.

    Raises:
        ConfigError: For an OSError.
    """
    try:
        yield
    except OSError as error:
        where = field if path is None else f"{field}: {path}"
        raise ConfigError(f"{where}: {describe_failure(error)}") from error


class ConfigParser(Protocol):
    """A function such as `parse_config`."""

    def __call__(self, text: str, *, source: str) -> Config:
        """Return the configuration, or raise `ConfigError`."""


def parse_config(text: str, *, source: str = "configuration") -> Config:
    """Parse and check a configuration.

    Raises:
        ConfigError: A line for each mistake: path, value and what is allowed.
    """
    return check_sections(read_sections(text, source=source), source=source)


def read_sections(text: str, *, source: str = "configuration") -> dict[str, Any]:
    """Parse the sections of a configuration without checking them.

    Raises:
        ConfigError: It is not a mapping in YAML.
    """
    try:
        data = load_yaml(text)
    except YamlError as error:
        raise ConfigError(f"{source}: {error}") from error
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
        mistakes = error.errors(include_url=False, include_context=False)
        lines = [f"{source}: {_describe(item)}" for item in mistakes[:MAX_MISTAKES]]
        if len(mistakes) > MAX_MISTAKES:
            lines.append(f"{source}: and {len(mistakes) - MAX_MISTAKES} more mistakes")
        raise ConfigError("\n".join(lines)) from error


def load_config(path: Path) -> Config:
    """Read, parse and check a configuration file.

    Raises:
        ConfigError: It cannot be read, or as for `parse_config`.
    """
    return parse_config(read_config(path), source=str(path))


def read_config(path: Path) -> str:
    """Return the text of a configuration file.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        return read_text(path)
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        raise ConfigError(f"{path}: cannot be read: {describe_failure(error)}") from error


def _describe(item: Any) -> str:
    where = ".".join(_name(part) for part in item["loc"]) or "(top level)"
    kind, message = item["type"], item["msg"].removeprefix("Value error, ")
    if kind == "extra_forbidden" and where in REMOVED:
        return f"{where}: no longer there: {REMOVED[where]}"
    if kind == "extra_forbidden":
        return f"{where}: unknown; allowed: {', '.join(_allowed_in(item['loc'][:-1]))}"
    if kind == "missing":
        return f"{where}: missing"
    if not item["loc"]:
        return f"{where}: {message}"
    return (
        f"{where}: {repr(item['input'])[:_MAX_SHOWN_CHARS]}: {_plain(kind, message, item['loc'])}"
    )


def _plain(kind: str, message: str, location: tuple[int | str, ...]) -> str:
    """Return pydantic's message without words of Python."""
    if kind == "model_type":
        return f"must be a mapping; allowed in it: {', '.join(_allowed_in(location))}"
    if kind in _PLAIN:
        return _PLAIN[kind]
    return message.replace("Input should", "must", 1).replace("String should", "must", 1)


def _name(part: int | str) -> str:
    """Return a part of a path on one line, whatever it contains."""
    text = str(part)
    return (text if text.isprintable() else ascii(text))[:_MAX_SHOWN_CHARS]


def _allowed_in(location: tuple[int | str, ...]) -> list[str]:
    """Return the names that are allowed in the section at this place."""
    section: Any = Config
    for part in location:
        field = section.model_fields.get(part)  # else the index or the name of an entry
        section = (section_in(field.annotation) if field else None) or section
    return list(section.model_fields)
