"""The base class of sections, and addresses in them."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, WithJsonSchema, model_validator

from extproc.address import MAX_PORT, Address


def check_host_port(text: str) -> str:
    """Return the text if it is an address.

    Raises:
        ValueError: It is not an address; the message says what is allowed.
    """
    try:
        Address.parse(text)
    except ValueError:
        raise ValueError(
            f"must be `host:port` (IPv6: `[host]:port`), the port at most {MAX_PORT}"
        ) from None
    return text


def check_ip_port(text: str) -> str:
    """Return the text if it is an address without a name.

    Raises:
        ValueError: It is not; the message says what is allowed.
    """
    host = Address.parse(check_host_port(text)).host
    try:
        ip_address(host)
    except ValueError:
        raise ValueError(f"must be `ip:port`: {host} is a name") from None
    return text


_PORT = "([0-9]{1,4}|[0-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_SCHEMA = WithJsonSchema({"type": "string", "pattern": f":{_PORT}$"})
"""For who reads the schema alone, as Helm does."""

HostPort = Annotated[str, AfterValidator(check_host_port), _SCHEMA]
"""`host:port` or `[v6]:port`, as `address` reads it."""
IpPort = Annotated[str, AfterValidator(check_ip_port), _SCHEMA]
"""The same where nothing looks a name up."""


class Section(BaseModel):
    """A mapping in the file: unknown keys are errors, and instances are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class OneOf(Section):
    """A section in which exactly one of the fields `ONE_OF` is given: the rest are None."""

    ONE_OF: ClassVar[tuple[str, ...]]

    def given(self) -> dict[str, Any]:
        """Return those that are given."""
        values = {name: getattr(self, name) for name in self.ONE_OF}
        return {name: value for name, value in values.items() if value is not None}

    @model_validator(mode="after")
    def _one_is_given(self) -> Self:
        if len(self.given()) != 1:
            raise ValueError(f"give exactly one of: {', '.join(self.ONE_OF)}")
        return self


def section_in(annotation: Any) -> type[Section] | None:
    """Return the section in an annotation, also inside unions and tuples."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    parts = getattr(annotation, "__args__", ())
    return next((found for part in parts if (found := section_in(part))), None)
