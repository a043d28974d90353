"""Log lines inside vLLM's processes."""

from __future__ import annotations

import logging


def join_vllm_log() -> None:
    """Write to vLLM's log what KVStow says, unless somebody has configured the logger "kvstow": vLLM configures its own
    logger alone, and lines of others below a warning are lost. Idempotent."""
    ours, theirs = logging.getLogger("kvstow"), logging.getLogger("vllm")
    if ours.handlers or ours.level != logging.NOTSET or not theirs.handlers:
        return
    ours.handlers = list(theirs.handlers)
    ours.setLevel(theirs.level)
    ours.propagate = False
