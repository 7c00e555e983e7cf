"""The cost of each abuse of the table in docs/wire.md until its limit ends it.

Feeds `extproc.wire` under its default limits, without sockets, in reads of 64 KiB. CPU is the
process's time inside the core's calls, the service's echo included, so it holds on a busy machine
too. Memory is the most that Python's allocator had given out beyond what it had before, in a pass
of its own, because counting it slows everything. Between any two calls another connection of the
same server asks on a call that it holds, and opens a new one; both must be answered.
"""

from __future__ import annotations

import gc
import sys
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from struct import Struct

import hpack

from bench.attacks import ATTACKS, ECHO, READY, Attack, Step, open_stream, split_frames
from bench.figures import render_table
from bench.machine import describe
from bench.report import keep, parser
from extproc.stack.processes import StackError
from extproc.wire import Connection, Counters, frames
from extproc.wire.budget import Budget
from extproc.wire.limits import ErrorCode
from extproc.wire.rpc import Call, Code, Method

# Last stream, error code (9113 6.8).
_GOAWAY = Struct(">II")
_QUESTION = b"\x00" + frames.U32.pack(4) + b"ping"


class _Echo:
    """The service: answers every message with itself, keeps nothing."""

    __slots__ = ("_call",)

    def __init__(self, call: Call, metadata: Mapping[str, str]) -> None:
        self._call = call

    def receive(self, message: bytes) -> None:
        self._call.send(message)

    def half_close(self) -> None:
        self._call.end()

    def closed(self) -> None:
        pass


def _connect(counters: Counters, budget: Budget, hello: bytes) -> Connection:
    connection = Connection({ECHO: Method(ECHO, _Echo)}, now=0.0, counters=counters, budget=budget)
    connection.receive(hello, now=0.0)
    connection.data_to_send()
    return connection


class Bystander:
    """Another peer of the server, who behaves.

    Attributes:
        asked: How often it asked; each time on a call that it holds and on a new one.
        refused: New calls that were answered with REFUSED_STREAM.
        unanswered: Of both kinds, what got neither.
    """

    def __init__(self, counters: Counters, budget: Budget) -> None:
        self.asked = self.refused = self.unanswered = 0
        self._connection = _connect(counters, budget, READY)

    def ask(self, now_s: float) -> None:
        """Ask on both calls."""
        self.asked += 1
        new_id = 2 * self.asked + 1
        question = (
            # What the last answers used of the windows.
            frames.window_update(0, 2 * len(_QUESTION)),
            frames.window_update(1, len(_QUESTION)),
            frames.frame(frames.DATA, 0, 1, _QUESTION),
            open_stream(new_id),
            frames.frame(frames.DATA, frames.END_STREAM, new_id, _QUESTION),
        )
        self._connection.receive(b"".join(question), now=now_s)
        self._connection.tick(now=now_s)
        answers = list(split_frames(self._connection.data_to_send()))
        answered = {sid for kind, sid, got in answers if kind == frames.DATA and got == _QUESTION}
        refusal = (frames.RST_STREAM, new_id, frames.U32.pack(ErrorCode.REFUSED_STREAM))
        is_refused = refusal in answers
        self.refused += is_refused
        self.unanswered += (1 not in answered) + (new_id not in answered and not is_refused)


@dataclass(frozen=True, slots=True)
class Row:
    """The outcome of one attack.

    Attributes:
        limit: The limit's name.
        what: What is sent.
        sent_frames: Until the limit, behind the handshake.
        sent_bytes: Likewise.
        elapsed_s: What the core was told of time: 0 but for time limits.
        cpu_ms: In the core.
        longest_ms: The longest of its passes and ticks, for which everybody else waits.
        peak_bytes: Held at most beyond an open connection.
        ending: How the peer was told.
        asked: How often the bystander asked.
        refused: Its new calls that were refused.
        is_as_promised: The ending is the one of the table and the bystander was answered throughout
            (refused only by a limit that is one of all connections), and again afterwards.
    """

    limit: str
    what: str
    sent_frames: int
    sent_bytes: int
    elapsed_s: float
    cpu_ms: float
    longest_ms: float
    peak_bytes: int
    ending: str
    asked: int
    refused: int
    is_as_promised: bool


class Trial:
    """One pass of one attack.

    Attributes:
        bystander: The other peer.
        cpu_ns: Used in the core for the attacker.
        longest_ns: Of it, the longest pass or tick.
        num_steps: Taken until the limit was passed.
        ending: How the attacker was told.
    """

    def __init__(self, attack: Attack, steps: Sequence[Step]) -> None:
        self._abuse = attack.abuse
        self._steps = steps
        self._counters, budget = Counters(), Budget()
        num_connections = 1 + max(step.connection for step in steps)
        self._connections = [
            _connect(self._counters, budget, attack.hello) for _ in range(num_connections)
        ]
        self.bystander = Bystander(self._counters, budget)
        self.cpu_ns = self.longest_ns = self.num_steps = 0
        self.ending = "not ended"

    def run(self) -> None:
        """Take steps until the limit is passed."""
        for step in self._steps:
            self.num_steps += 1
            output = self._take(step)
            is_passed = self._counters.abuse[self._abuse] > 0
            self.bystander.ask(step.now_s)
            if is_passed:
                self.ending = read_ending(output)
                return

    def is_served_afterwards(self) -> bool:
        """Let the attacker's sockets go; ask once more, which nothing may refuse any more."""
        for connection in self._connections:
            connection.lose()
        refused = self.bystander.refused
        self.bystander.ask(self._steps[self.num_steps - 1].now_s)
        return self.bystander.refused == refused and not self.bystander.unanswered

    def _take(self, step: Step) -> bytes:
        """A tick, or the passes over a read, with others in between; what was written."""
        connection = self._connections[step.connection]
        output, position = b"", 0
        while True:
            begun_ns = time.process_time_ns()
            if step.data:
                position = connection.receive_pass(step.data, position, now=step.now_s)
            else:
                connection.tick(now=step.now_s)
            output += connection.data_to_send()
            used_ns = time.process_time_ns() - begun_ns
            self.cpu_ns += used_ns
            self.longest_ns = max(self.longest_ns, used_ns)
            if position == len(step.data):
                return output


def read_ending(output: bytes) -> str:
    """Name what a connection's last write told: GOAWAY, else the end of the last stream in it."""
    ending = "nothing"
    for kind, _, payload in split_frames(output):
        if kind == frames.GOAWAY:
            last_id, code = _GOAWAY.unpack_from(payload)
            is_drain = last_id == frames.LARGEST_STREAM_ID
            return "drained" if is_drain else f"GOAWAY {ErrorCode(code).name}"
        if kind == frames.RST_STREAM and any(payload):
            ending = ErrorCode(frames.U32.unpack(payload)[0]).name
        elif kind == frames.HEADERS:
            fields = dict(hpack.Decoder().decode(payload, raw=True))
            ending = Code(int(fields.get(b"grpc-status", 0))).name
    return ending


def measure(attack: Attack) -> Row:
    """Run an attack twice: for CPU and endings, and for memory."""
    steps = attack.make_steps()
    trial = Trial(attack, steps)
    gc.collect()
    trial.run()
    asked, refused = trial.bystander.asked, trial.bystander.refused
    is_on_all = max(step.connection for step in steps) > 0
    is_unharmed = trial.is_served_afterwards() and (is_on_all or not refused)
    sent = [step.data for step in steps[: trial.num_steps]]
    return Row(
        limit=attack.abuse,
        what=attack.what,
        sent_frames=sum(1 for data in sent for _ in split_frames(data)),
        sent_bytes=sum(map(len, sent)),
        elapsed_s=steps[trial.num_steps - 1].now_s,
        cpu_ms=trial.cpu_ns / 1e6,
        longest_ms=trial.longest_ns / 1e6,
        peak_bytes=_peak_bytes(attack, steps),
        ending=trial.ending,
        asked=asked,
        refused=refused,
        is_as_promised=trial.ending == attack.ending and is_unharmed,
    )


def _peak_bytes(attack: Attack, steps: Sequence[Step]) -> int:
    tracemalloc.start()
    try:
        trial = Trial(attack, steps)
        tracemalloc.reset_peak()
        before_bytes, _ = tracemalloc.get_traced_memory()
        trial.run()
        return tracemalloc.get_traced_memory()[1] - before_bytes
    finally:
        tracemalloc.stop()


def render(rows: Sequence[Row]) -> str:
    """The table."""
    header = ["what is sent", "limit", "frames", "KB", "after s", "CPU ms", "longest ms"]
    header += ["held KB", "how it ends", "others answered"]
    return render_table(header, [_cells(row) for row in rows])


def _cells(row: Row) -> list[str]:
    answered = f"{row.asked - row.refused:,} of {row.asked:,}"
    return [
        row.what,
        row.limit,
        f"{row.sent_frames:,}",
        f"{row.sent_bytes / 1e3:,.1f}",
        f"{row.elapsed_s:g}",
        f"{row.cpu_ms:,.3g}" if row.cpu_ms < 100 else f"{row.cpu_ms:,.0f}",
        f"{row.longest_ms:.3g}",
        f"{row.peak_bytes / 1e3:,.0f}",
        row.ending,
        answered if row.is_as_promised else f"{answered}: NOT AS PROMISED",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; the exit status is 1 where a row did not end as promised."""
    args = parser("abuse", __doc__, has_quick=False).parse_args(arguments)
    try:
        machine = describe()
    except StackError as error:
        print(f"bench-abuse: {error}", file=sys.stderr)
        return 1
    rows = [measure(attack) for attack in ATTACKS]
    print(render(rows))
    keep("abuse", args, machine, {"rows": [asdict(row) for row in rows]})
    return 0 if all(row.is_as_promised for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
