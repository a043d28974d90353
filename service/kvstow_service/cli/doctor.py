"""`kvstow doctor`: problems, and what to do about them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from kvstow_api.numberformat import counted
from kvstow_service.cli.allcontexts import AllContexts, Answers, remote_or_all
from kvstow_service.cli.connection import Connection
from kvstow_service.cli.failures import ExitCode
from kvstow_service.cli.output import STATE_STYLES, Format, emit, plain, styled, wide_format_flag

if TYPE_CHECKING:
    from kvstow_api.views.doctor import DoctorView


@click.command()
@wide_format_flag
@remote_or_all
def doctor(target: Connection | AllContexts, style: Format) -> None:
    """Diagnose problems and suggest fixes.

    Exit code 1 if there is a warning or an error. wide shows the numbers, and the checks that could not run. With
    --all-contexts the servers of all contexts are diagnosed; the exit code is 6 if some give no answer.
    """
    from kvstow_api.client import calls

    if isinstance(target, AllContexts):
        answers = target.ask(lambda client: client.send(calls.doctor()))
        items = [{"context": context, **plain(view)} for context, view in answers.views.items()]
        emit({"items": items, "errors": answers.failed()}, style, lambda _: _of_all(answers, wide=style == "wide"))
        healthy = all(view.healthy for view in answers.views.values())
        click.get_current_context().exit(answers.report() or (ExitCode.OK if healthy else ExitCode.ERROR))
    with target.client() as client:
        view = client.send(calls.doctor())
    emit(view, style, lambda view: "\n".join(_lines(view, wide=style == "wide")))
    click.get_current_context().exit(ExitCode.OK if view.healthy else ExitCode.ERROR)


def _of_all(answers: Answers[DoctorView], *, wide: bool) -> str:
    parts = [
        "\n".join([styled(f"context {context}", bold=True), *_lines(view, wide=wide)])
        for context, view in answers.views.items()
    ]
    return "\n\n".join(parts)


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
