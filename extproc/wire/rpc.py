"""The contract of the gRPC services, by the name that services use: it belongs to no transport."""

from extproc.wire.service import NO_SESSION, Call, Code, Metadata, Method, Session

__all__ = ["NO_SESSION", "Call", "Code", "Metadata", "Method", "Session"]
