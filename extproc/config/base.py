"""What the sections of the configuration are made of. Part of `extproc.config`."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from extproc.core.address import MAX_PORT


def check_port(address: str) -> str:
    """Answer `host:port` if the port is one.

    Raises:
        ValueError: It is too large.
    """
    if int(address.rpartition(":")[2]) > MAX_PORT:
        raise ValueError(f"the port must be at most {MAX_PORT}")
    return address


Address = Annotated[
    str,
    Field(pattern=r"^(\[[0-9A-Fa-f:.]+\]|[^\s:/,%]+):[0-9]{1,5}$", examples=["127.0.0.1:9002"]),
    AfterValidator(check_port),
]
"""`host:port` or `[v6]:port`."""


class Section(BaseModel):
    """A mapping in the file: unknown keys are refused, and nothing changes once it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
