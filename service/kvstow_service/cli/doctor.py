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
    from kvstow_api.answers import DoctorView


@click.command()
@wide_format_flag
@remote
def doctor(connection: Connection, style: Format) -> None:
    """Tell what is wrong, whom it concerns, and what mends it.

    Exit code 1 if there is a warning or an error. wide shows the numbers, and what could not be measured.
    """
    from kvstow_api.client import calls

    with connection.client() as client:
        view = client.send(calls.doctor())
    emit(view, style, lambda view: "\n".join(_lines(view, wide=style == "wide")))
    click.get_current_context().exit(ExitCode.OK if view.healthy else ExitCode.ERROR)


def _lines(view: DoctorView, *, wide: bool) -> Iterator[str]:
    for one in view.conditions:
        yield f"{styled(one.severity, STATE_STYLES.get(one.severity))}  {one.what}"
        yield f"  why  {one.why}"
        yield f"  fix  {one.fix}"
        if wide:
            numbers = ", ".join(f"{name} {value:,g}" for name, value in one.evidence.items())
            yield f"  {one.name}: {numbers or 'no numbers'}"
        yield ""
    yield f"{counted(len(view.conditions), 'condition')}; {counted(len(view.checked), 'kind')} looked for"
    if wide:
        yield from (f"not looked for: {name}: {reason}" for name, reason in view.skipped.items())
