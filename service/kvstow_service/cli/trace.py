"""`kvstow trace`: request traces."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Annotated

import typer

from kvstow.errors import KvstowError

EXIT_BAD_INPUT = 2

app = typer.Typer(no_args_is_help=True, help="Make request traces.")


@app.callback()
def trace() -> None:
    """Make request traces."""


@app.command()
def generate(
    sessions: Annotated[int, typer.Option(help="Conversations.")] = 100,
    turns: Annotated[int, typer.Option(help="Turns of a conversation, on average.")] = 5,
    requests: Annotated[int | None, typer.Option(help="Keep so many of the first requests.")] = None,
    shared_prompts: Annotated[int, typer.Option(help="System prompts that conversations share.")] = 4,
    seed: Annotated[int, typer.Option(help="The same seed and options give the same trace.")] = 0,
    output: Annotated[str, typer.Option(help="File to write; - is standard output.")] = "-",
) -> None:
    """Generate multi-turn conversations with shared system prompts, as JSON lines."""
    from kvstow_service.replay.generate import TraceShape, generate_trace

    try:
        shape = TraceShape(sessions=sessions, turns=turns, shared_prompts=shared_prompts, seed=seed)
        found = generate_trace(shape, limit=requests)
        with nullcontext(sys.stdout) if output == "-" else open(output, "w", encoding="utf-8") as stream:
            stream.writelines(f"{request.to_line()}\n" for request in found)
    except (KvstowError, OSError) as error:
        typer.echo(f"kvstow trace generate: {error}", err=True)
        raise typer.Exit(EXIT_BAD_INPUT) from error
