"""How do bytes become messages? Our HTTP/2 and gRPC server, its TLS and its limits;
`httpserver` is the listener of the admin port. Begin with `connection`, which is one HTTP/2
connection as functions of bytes; `server` gives it sockets and a clock. Rooms whose services it
carries import its contract, `rpc`.

1. Bytes come in through `Connection.receive_pass` and go out through `Connection.data_to_send`.
   There is no socket, clock or event loop: their owner passes `now` (monotonic seconds).
2. One pass handles the frames of a read, calls the sessions of all its streams, and collects all
   their responses. One `data_to_send` takes them. That is where the speed comes from: a read
   carries many streams, and costs one pass and one write.
3. No exception leaves: any input of the peer ends in a response, a reset stream, or a GOAWAY and
   `is_over`. An exception of a session ends its own stream only.
4. A table (`streamstates`) says which frame is allowed in which state. The path of nearly every
   frame checks one flag and skips the table.
5. The rule of RFC 9113 that a line implements is named above it by section number ("9113 6.9.1").
   docs/wire.md lists them with their tests.
6. Everything that a peer can make us store or do has a limit in `Limits`, and is counted under a
   name in `Abuse`.
"""

from extproc.wire.connection import Connection
from extproc.wire.limits import Abuse, Counters, Limits

__all__ = ["Abuse", "Connection", "Counters", "Limits"]
