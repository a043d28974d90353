"""`kvstow trace`: generate request traces."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import TextIO

import click

from kvstow.errors import ConfigError
from kvstow_service.cli.failures import reporting_failures


@click.group()
def trace() -> None:
    """Generate request traces."""


@trace.command()
@click.option("--sessions", type=int, default=100, show_default=True, help="Number of conversations.")
@click.option("--turns", type=int, default=5, show_default=True, help="Average number of turns of a conversation.")
@click.option("--requests", type=int, help="Only this many requests, the first.")
@click.option(
    "--shared-prompts",
    type=int,
    default=4,
    show_default=True,
    help="Number of shared system prompts.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed and options give the same trace.")
@click.option("--output", default="-", show_default=True, help="File to write; - is standard output.")
def generate(sessions: int, turns: int, requests: int | None, shared_prompts: int, seed: int, output: str) -> None:
    """Generate multi-turn conversations with shared system prompts, as JSON lines."""
    from kvstow_service.replay.trace import TraceShape, generate_trace

    with reporting_failures():
        shape = TraceShape(sessions=sessions, turns=turns, shared_prompts=shared_prompts, seed=seed)
        found = generate_trace(shape, limit=requests)
        with nullcontext(sys.stdout) if output == "-" else _open(output) as stream:
            stream.writelines(f"{request.to_line()}\n" for request in found)


def _open(path: str) -> TextIO:
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise ConfigError("--output", path, f"a writable file, or - ({error.strerror})") from error
