"""`kvstow doctor`: what is not as it should be, and what to do about it."""

from __future__ import annotations

from typing import Any

import click

from kvstow_api.numberformat import counted
from kvstow_service.cli.connection import Connection, remote
from kvstow_service.cli.exits import ExitCode
from kvstow_service.cli.output import STATE_STYLES, Format, console, emit, format_flag


@click.command()
@format_flag
@remote
def doctor(connection: Connection, style: Format) -> None:
    """Say what is not as it should be, and what mends it.

    Exit code 1 if there is a warning or an error. wide shows the numbers, and the checks that could not be made.
    """
    from kvstow_api.client import calls

    with connection.client() as client:
        view = client.send(calls.doctor())
    emit(view, style, lambda view: _show(view, wide=style == "wide"))
    click.get_current_context().exit(ExitCode.OK if view.healthy else ExitCode.ERROR)


def _show(view: Any, *, wide: bool) -> None:
    from rich.text import Text

    out = console()
    for finding in view.findings:
        out.print(Text.assemble((finding.severity, STATE_STYLES.get(finding.severity, "")), f"  {finding.what}"))
        out.print(Text(f"  why  {finding.why}\n  fix  {finding.fix}"))
        if wide:
            numbers = ", ".join(f"{name} {value:,g}" for name, value in finding.evidence.items())
            out.print(Text(f"  {finding.check}: {numbers or 'no numbers'}", style="dim"))
        out.print()
    found = counted(len(view.findings), "finding") if view.findings else "no findings"
    out.print(Text(f"{counted(len(view.checks), 'check')}, {found}"))
    if wide:
        for check, reason in view.skipped.items():
            out.print(Text(f"not made: {check}: {reason}", style="dim"))
