"""`kvstow doctor`: problems, and what to do about them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from kvstow_api.numberformat import counted
from kvstow_service.cli.connection import Connection, remote
from kvstow_service.cli.failures import ExitCode
from kvstow_service.cli.output import STATE_STYLES, Format, emit, styled, wide_format_flag

if TYPE_CHECKING:
    from kvstow_api.views.doctor import DoctorView


@click.command()
@wide_format_flag
@remote
def doctor(connection: Connection, style: Format) -> None:
    """Diagnose problems and suggest fixes.

    Exit code 1 if there is a warning or an error. wide shows the numbers, and the checks that could not run.
    """
    from kvstow_api.client import calls

    with connection.client() as client:
        view = client.send(calls.doctor())
    emit(view, style, lambda view: "\n".join(_lines(view, wide=style == "wide")))
    click.get_current_context().exit(ExitCode.OK if view.healthy else ExitCode.ERROR)


def _lines(view: DoctorView, *, wide: bool) -> Iterator[str]:
    for finding in view.findings:
        yield f"{styled(finding.severity, STATE_STYLES.get(finding.severity))}  {finding.what}"
        yield f"  why  {finding.why}"
        yield f"  fix  {finding.fix}"
        if wide:
            numbers = ", ".join(f"{name} {value:,g}" for name, value in finding.evidence.items())
            yield f"  {finding.check}: {numbers or 'no numbers'}"
        yield ""
    yield f"{counted(len(view.checks), 'check')}, {counted(len(view.findings), 'finding')}"
    if wide:
        yield from (f"skipped: {check}: {reason}" for check, reason in view.skipped.items())
