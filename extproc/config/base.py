"""The base of the configuration's sections, and addresses in them."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from extproc.core.address import MAX_PORT, Address


def check_host_port(text: str) -> str:
    """Return the text if it is an address.

    Raises:
        ValueError: It is not; the message says what is allowed.
    """
    try:
        Address.parse(text)
    except ValueError:
        raise ValueError(
            f"must be `host:port` (IPv6: `[host]:port`), the port at most {MAX_PORT}"
        ) from None
    return text


HostPort = Annotated[str, AfterValidator(check_host_port)]
"""`host:port` or `[v6]:port`, as `core.address` reads it."""


class Section(BaseModel):
    """A mapping in the file: unknown keys are refused, and nothing changes once it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
