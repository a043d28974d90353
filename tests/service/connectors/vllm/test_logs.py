"""Log lines inside vLLM's processes."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from kvstow_service.connectors.vllm.logs import join_vllm_log

OURS, THEIRS = logging.getLogger("kvstow"), logging.getLogger("vllm")


@pytest.fixture
def vllm_handler() -> Iterator[logging.Handler]:
    """vLLM's logger as vLLM configures it, and ours as nobody has."""
    before = [(each, each.handlers, each.level, each.propagate) for each in (OURS, THEIRS)]
    handler = logging.NullHandler()
    THEIRS.handlers, OURS.handlers, OURS.propagate = [handler], [], True
    THEIRS.setLevel(logging.INFO)
    OURS.setLevel(logging.NOTSET)
    yield handler
    for logger, handlers, level, propagate in before:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_what_kvstow_says_goes_to_vllms_log(vllm_handler: logging.Handler) -> None:
    for _ in range(2):
        join_vllm_log()
    assert (OURS.handlers, OURS.level, OURS.propagate) == ([vllm_handler], logging.INFO, False)


@pytest.mark.parametrize("configure", ["handler", "level"])
@pytest.mark.usefixtures("vllm_handler")
def test_a_logger_that_somebody_has_configured_is_left_alone(configure: str) -> None:
    own = logging.NullHandler()
    if configure == "handler":
        OURS.addHandler(own)
    else:
        OURS.setLevel(logging.DEBUG)
    join_vllm_log()
    assert OURS.handlers == ([own] if configure == "handler" else [])
    assert OURS.propagate


@pytest.mark.usefixtures("vllm_handler")
def test_where_vllm_has_configured_nothing_nothing_changes() -> None:
    THEIRS.handlers = []
    join_vllm_log()
    assert (OURS.handlers, OURS.level, OURS.propagate) == ([], logging.NOTSET, True)
