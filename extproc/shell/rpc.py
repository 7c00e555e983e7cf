"""The contract of the gRPC services, by the name that services use: it belongs to no transport."""

from extproc.core.wire.service import Call, Code, Metadata, Method, Session

__all__ = ["Call", "Code", "Metadata", "Method", "Session"]
