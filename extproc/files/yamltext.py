"""YAML as operators write it: the configuration and the file of endpoints.

PyYAML's safe loader bounds the types that it creates, not their number: ten short lines of aliases
stand for billions of values ("billion laughs"). It takes repeated keys, and some of its errors are
no YAMLError. Here the text, its values and their length are bounded, aliases counted with their
contents, and every error is a `YamlError` of one line. Nesting is bounded, since PyYAML looks
through all open brackets at each token.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import yaml

MAX_CHARS = 1024 * 1024
"""The limit of a Kubernetes ConfigMap, in bytes."""
MAX_VALUES = 50_000
"""Keys and values, those of aliases included: 10,000 pods with names, which take 1.5 s."""
MAX_DEPTH = 32
"""Collections around a value. At twice as many, each value takes twice as long."""
MAX_VALUE_CHARS = 4096
"""The longest path (PATH_MAX). Longer numbers are slow: `1:1:1:...` is read to base 60."""
_MAX_MESSAGE_CHARS = 300
_MERGE = "tag:yaml.org,2002:merge"


class YamlError(ValueError):
    """Not YAML, or over a limit; the message is one line."""


def load_yaml(text: str) -> Any:
    """Parse one document; return None if it is empty.

    Raises:
        YamlError: Not YAML, a duplicate key, or over a limit.
    """
    if len(text) > MAX_CHARS:
        raise YamlError(f"more than {MAX_CHARS} characters")
    try:
        return yaml.load(text, _Loader)
    except YamlError:
        raise
    except yaml.MarkedYAMLError as error:
        raise YamlError(f"not YAML: {_marked(error)}") from error
    except Exception as error:
        # 2024-13-45 is a ValueError, `!!bool x` a KeyError, `!!int ""` an IndexError, and so on.
        raise YamlError(f"not YAML: {_one_line(str(error) or type(error).__name__)}") from error


class _Loader(yaml.SafeLoader):
    """Counts values, and refuses duplicate keys: PyYAML would ignore the first."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._num_values = 0
        self._num_values_of: dict[str | None, int] = {}  # by anchor, whole ones only
        self._depth = 0
        self._merged: set[yaml.MappingNode] = set()

    def fetch_flow_collection_start(self, token: Any) -> None:
        # Here too: the scanner is ahead of what is composed by a thousand brackets.
        if self.flow_level > MAX_DEPTH:
            raise _too_deep()
        super().fetch_flow_collection_start(token)

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self._depth > MAX_DEPTH:
            raise _too_deep()
        self._depth += 1
        node = self._compose_node(parent, index)
        self._depth -= 1
        return node

    def _compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call] # it has no stubs
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > MAX_VALUE_CHARS:
            raise YamlError(f"a value of more than {MAX_VALUE_CHARS} characters")
        before = self._num_values
        node = super().compose_node(parent, index)
        if isinstance(event, yaml.AliasEvent):  # without an end, if it is within its anchor
            self._num_values += self._num_values_of.get(event.anchor, MAX_VALUES + 1)
        else:
            self._num_values += 1
            self._num_values_of[event.anchor] = self._num_values - before
        if self._num_values > MAX_VALUES:
            raise YamlError(f"more than {MAX_VALUES} values, aliases written out")
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Put what `<<` names before a mapping's own keys, which then count.

        PyYAML's own takes the wrong one of two equal keys, depending on its version.
        """
        if node in self._merged:
            return
        self._merged.add(node)
        self._check_keys(node)
        merged = [
            pair for key, value in node.value if key.tag == _MERGE for pair in self._of(value)
        ]
        node.value[:] = merged + [pair for pair in node.value if pair[0].tag != _MERGE]

    def _of(self, node: yaml.Node) -> Iterator[Any]:
        """Yield the keys and values that `<<` names, those that count last."""
        several = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for each in reversed(several):
            if not isinstance(each, yaml.MappingNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "<< must name a mapping, or a list of them", each.start_mark
                )
            self.flatten_mapping(each)
            yield from each.value

    def _check_keys(self, node: yaml.MappingNode) -> None:
        seen = set()
        for key_node, _ in node.value:
            key = "<<" if key_node.tag == _MERGE else self.construct_object(key_node)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)


def _too_deep() -> YamlError:
    return YamlError(f"more than {MAX_DEPTH} collections in one another")


def _marked(error: yaml.MarkedYAMLError) -> str:
    mark, problem = error.problem_mark, error.problem or error.context or "cannot be read"
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return where + _one_line(problem)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    printable = "".join(char if char.isprintable() else "?" for char in line)
    return printable[:_MAX_MESSAGE_CHARS]
