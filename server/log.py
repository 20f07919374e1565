"""The log of every process of a server: text or JSON on standard error, with the process's role and the request's id.

Messages of exceptions that are not Peraxis' own are left out unless prompts are logged, because they may quote a
tenant's text. Text of a tenant in other messages stays within their line.
"""

from __future__ import annotations

import io
import json
import logging
import re
import traceback
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from deltastore.errors import PeraxisError
from server.protocol.request import current_request, trace_id_of
from server.settings import Settings

TEXT = "%(asctime)s %(levelname)s {role}[%(process)d] %(name)s: %(message)s%(request)s"
# Hidden messages in a traceback.
HIDDEN = "(message hidden: --log-prompts shows it)"

# What ends a line or steers a terminal.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")

ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def configure_logging(role: str, settings: Settings) -> None:
    """Log to standard error as the settings say; the server's own modules from INFO on."""
    handler = logging.StreamHandler()
    handler.addFilter(_add_request)
    formatter = JsonFormatter if settings.log_format == "json" else TextFormatter
    handler.setFormatter(formatter(role, shows_messages=settings.log_prompts))
    logging.basicConfig(handlers=[handler], force=True)
    logging.getLogger("server").setLevel(logging.INFO)


class LogLines(io.TextIOBase):
    """A text file whose lines, each written at once, become messages of a logger."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log

    def write(self, text: str, /) -> int:
        self._log.info("%s", text.rstrip())
        return len(text)


class TextFormatter(logging.Formatter):
    """One line per message, and the lines of a traceback."""

    def __init__(self, role: str, *, shows_messages: bool) -> None:
        super().__init__(TEXT.format(role=role))
        self._shows_messages = shows_messages

    def format(self, record: logging.LogRecord) -> str:
        # Another formatter's text of the exception may show its message.
        record.exc_text = None
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        return _in_one_line(super().formatMessage(record))

    def formatException(self, ei: ExceptionInfo) -> str:
        """Return a traceback; see the file's docstring for messages in it."""
        if self._shows_messages or ei[1] is None:
            return super().formatException(ei)
        return "".join(_without_messages(ei[1])).rstrip()


class JsonFormatter(TextFormatter):
    """One JSON object per line."""

    def __init__(self, role: str, *, shows_messages: bool) -> None:
        super().__init__(role, shows_messages=shows_messages)
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        document: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "role": self._role,
            "process": record.process,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        for name in ("request_id", "trace_id"):
            if (value := getattr(record, name, None)) is not None:
                document[name] = value
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document)


def _add_request(record: logging.LogRecord) -> bool:
    """Give a record the request of its task, unless its `extra` names one."""
    context = current_request.get()
    fields = record.__dict__
    if context is not None:
        fields.setdefault("request_id", context.id)
        fields.setdefault("trace_id", trace_id_of(context.traceparent))
    request_id = fields.get("request_id")
    fields["request"] = "" if request_id is None else f" [request {request_id}]"
    return True


def _in_one_line(text: str) -> str:
    return CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def _without_messages(error: BaseException) -> list[str]:
    """Return the lines of a traceback in which only Peraxis' own errors have messages."""
    lines: list[str] = []
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        lines += [*_without_messages(cause), "\nwhich led to:\n\n"]
    message = _in_one_line(str(error)) if isinstance(error, PeraxisError) else HIDDEN
    frames = traceback.format_list(traceback.extract_tb(error.__traceback__))
    return [
        *lines,
        "Traceback (most recent call last):\n",
        *frames,
        f"{type(error).__qualname__}: {message}\n",
    ]
