from __future__ import annotations

import json
import logging

import pytest

from kvstow_service.process.logwriter import configure_logs

pytestmark = pytest.mark.usefixtures("process_state")


def test_json_is_one_object_a_line_with_extras_and_the_exception(capfd: pytest.CaptureFixture[str]) -> None:
    log = configure_logs("json", "info")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("kvstow.agent").exception("rank %d", 3, extra={"rank": 3, "path": None})
    log.stop()
    (line,) = capfd.readouterr().err.splitlines()
    entry = json.loads(line)
    assert list(entry) == ["time", "level", "logger", "message", "rank", "path", "exception"]
    assert (entry["level"], entry["logger"], entry["message"], entry["rank"]) == ("error", "kvstow.agent", "rank 3", 3)
    assert entry["time"].endswith("+00:00")
    assert "ValueError: two\nlines" in entry["exception"]


def test_text_lines_have_time_level_logger_and_message(capfd: pytest.CaptureFixture[str]) -> None:
    log = configure_logs("text", "info")
    logging.getLogger("kvstow.pool").info("pinned %d", 4)
    log.stop()
    assert capfd.readouterr().err.endswith("INFO    kvstow.pool: pinned 4\n")


def test_the_level_is_a_threshold(capfd: pytest.CaptureFixture[str]) -> None:
    log = configure_logs("text", "warning")
    logging.getLogger("kvstow").info("quiet")
    logging.getLogger("kvstow").warning("loud")
    log.stop()
    assert capfd.readouterr().err.count("\n") == 1


def test_configuring_again_replaces_the_handlers(capfd: pytest.CaptureFixture[str]) -> None:
    configure_logs("text", "info").stop()
    log = configure_logs("text", "info")
    logging.getLogger("kvstow").info("once")
    log.stop()
    assert capfd.readouterr().err.count("once") == 1


def test_other_loggers_are_left_alone() -> None:
    root, other = logging.getLogger(), logging.getLogger("vllm")
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in (root, other)]
    configure_logs("json", "debug").stop()
    assert [(logger.handlers, logger.level, logger.propagate) for logger in (root, other)] == before
