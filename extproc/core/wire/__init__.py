"""HTTP/2 and gRPC, server side, as functions of bytes.

1. Bytes come in through `Connection.receive`, bytes go out through `Connection.data_to_send`. No
   socket, no clock, no event loop: whoever owns those passes `now` (monotonic seconds).
2. One `receive` handles every frame of a read, calls the sessions of all its streams, and collects
   everything they answer. One `data_to_send` takes it all. That is the whole secret of the speed:
   a read carries many streams, and costs one pass and one write.
3. Exceptions do not leave: whatever the peer sends ends in an answer, a reset stream, or a GOAWAY
   and `is_over`. Whatever a session raises ends its own stream only.
4. Which frame may come in which state is a table (`states`), not scattered conditions. The path
   that nearly every frame takes checks one flag and skips the table.
5. The rule of RFC 9113 that a line implements stands above it by section number ("9113 6.9.1").
   docs/wire.md lists them with their tests.
6. Whatever a peer can make us keep or do has a limit in `Limits`, and a name in `Abuse` under which
   it is counted.
"""

from extproc.core.wire.connection import Connection
from extproc.core.wire.limits import Abuse, Counters, Limits
from extproc.core.wire.service import Call, Method, Session
from extproc.core.wire.stream import WireStream

__all__ = [
    "Abuse",
    "Call",
    "Connection",
    "Counters",
    "Limits",
    "Method",
    "Session",
    "WireStream",
]
