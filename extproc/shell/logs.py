"""Structured logs: one JSON object a line, or plain lines for a terminal.

What is worth a field goes into `extra`; `logger.info("scrape failed", extra={"endpoint": address})`
gives a key `endpoint`. Decisions are logged at DEBUG only. Prompts and credentials are logged
nowhere; should one reach an exception's text, what looks like a credential is blanked here.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import TextIO

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
# A backslash ends it too: the quote that follows one in JSON must stay escaped.
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
    root = logging.getLogger()
    root.setLevel(level.upper())
    root.handlers[:] = [handler]
    # Its debug lines quote header fields, the client's credentials among them.
    logging.getLogger("hpack").setLevel(logging.WARNING)


class PlainFormatter(logging.Formatter):
    """A line for people, with the extra fields behind the message."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, more with an exception. What is logged cannot forge a line of its own."""
        fields = "".join(f" {name}={value}" for name, value in _extra(record).items())
        text = _CONTROL.sub(lambda found: repr(found[0])[1:-1], record.getMessage() + fields)
        line = f"{self.formatTime(record)} {record.levelname:<7} {record.name}: {text}"
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return _blank(line)


class JsonFormatter(logging.Formatter):
    """`{"time", "level", "logger", "message", ...extra fields, "exception"}`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
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
        return _blank(json.dumps(fields, default=str))


def _extra(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _blank(text: str) -> str:
    return _CREDENTIAL.sub(r"\1 ***", text)
