"""The hosts behind an engine's connectors. vLLM reaches them through hooks alone, and tests look at what those did."""

from __future__ import annotations

from typing import Any


def scheduler_host_of(connector: Any) -> Any:
    return connector._host


def rank_host_of(connector: Any) -> Any:
    return connector._rank


def give_scheduler_host(connector: Any, host: Any) -> None:
    connector._host = host


def give_rank_host(connector: Any, host: Any) -> None:
    connector._rank = host
