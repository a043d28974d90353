"""Log format of the process of `kvstow serve`: text, or one JSON object a line.

Only the loggers "kvstow", "uvicorn" and "asyncio" are configured; the root logger is left alone.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Literal

from kvstow_service.process.logwriter import QueuedLog

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

_TEXT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "taskName"}


class JsonFormatter(logging.Formatter):
    """Writes `time` (UTC), `level`, `logger`, `message`, the fields of `extra`, and `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD_FIELDS}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure_logs(log_format: LogFormat, level: LogLevel) -> QueuedLog:
    """Send these loggers to stderr. A second call replaces the first one's handler. The caller stops what it gets at
    the end, which writes the last lines."""
    handler = QueuedLog(JsonFormatter() if log_format == "json" else logging.Formatter(_TEXT))
    others = "debug" if level == "debug" else "warning"
    for name, threshold in (("kvstow", level), ("uvicorn", others), ("asyncio", others)):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(threshold.upper())
        logger.propagate = False
    return handler
