"""Structured logs: one JSON object a line, or plain lines for a terminal.

`extra` becomes fields; `logger.info("scrape failed", extra={"endpoint": address})` gives a key
`endpoint`. Decisions are logged at DEBUG only, prompts and credentials never; anything that looks
like a credential in an exception's text is masked here. Repeated lines are limited.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TextIO

MAX_REPEATS = 20
"""Records of one kind written in `REPEAT_WINDOW_S`."""
REPEAT_WINDOW_S = 10.0
_MAX_KINDS, _MAX_KIND_CHARS = 1000, 100

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
# A backslash ends it too: in JSON the quote after it must stay escaped.
_CREDENTIAL = re.compile(r"\b(Bearer|Basic)\s+[^\s\"',;\\]+", re.IGNORECASE)


def configure_logging(level: str, *, is_json: bool, stream: TextIO | None = None) -> None:
    """Send the root logger's records to `stream`, replacing its handlers.

    Args:
        level: A name of the logging module, in any case.
        is_json: JSON lines instead of plain ones.
        stream: Standard error where None.

    Raises:
        ValueError: There is no such level.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if is_json else PlainFormatter())
    handler.addFilter(RepeatLimit())
    root = logging.getLogger()
    root.setLevel(level.upper())
    root.handlers[:] = [handler]
    # Its debug lines contain header fields, the client's credentials among them.
    logging.getLogger("hpack").setLevel(logging.WARNING)


class RepeatLimit(logging.Filter):
    """Limits records of one kind per window; the next window's first has the number left out.

    A kind is a logger and its unformatted message, so a peer that causes log lines can neither fill
    a disk nor evade the limit by different values. DEBUG is not limited.
    """

    def __init__(self, max_records: int = MAX_REPEATS, window_s: float = REPEAT_WINDOW_S) -> None:
        super().__init__()
        self._max_records = max_records
        self._window_s = window_s
        self._kinds: dict[tuple[str, str], _Kind] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write it; the first one after a gap gets the field `left_out`."""
        if record.levelno <= logging.DEBUG:
            return True
        if len(self._kinds) > _MAX_KINDS:
            self._kinds.clear()
        kind = self._kinds.setdefault((record.name, str(record.msg)[:_MAX_KIND_CHARS]), _Kind())
        # The record has wall time, which may be set back.
        if not 0 <= record.created - kind.began_s < self._window_s:
            if kind.num_left_out:
                record.left_out = kind.num_left_out
            kind.began_s, kind.num_written, kind.num_left_out = record.created, 0, 0
        if kind.num_written < self._max_records:
            kind.num_written += 1
            return True
        kind.num_left_out += 1
        return False


@dataclass(slots=True)
class _Kind:
    began_s: float = 0.0
    num_written: int = 0
    num_left_out: int = 0


class PlainFormatter(logging.Formatter):
    """A line for people, with the extra fields after the message."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, more with an exception. A logged value cannot forge a line."""
        fields = "".join(f" {name}={value}" for name, value in _extra(record).items())
        text = _CONTROL.sub(lambda found: repr(found[0])[1:-1], record.getMessage() + fields)
        line = f"{self.formatTime(record)} {record.levelname:<7} {record.name}: {text}"
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return _mask(line)


class JsonFormatter(logging.Formatter):
    """`{"time", "level", "logger", "message", ...extra fields, "exception"}`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields = {
            **_extra(record),
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return _mask(json.dumps(fields, default=str))


def _extra(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _mask(text: str) -> str:
    return _CREDENTIAL.sub(r"\1 ***", text)
