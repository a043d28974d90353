"""The two ways in which `kvstow replay` runs a trace: over one engine here, and attached.

Each shows its progress, and ends at the first SIGINT or SIGTERM.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvstow_service.process.stop import StopRequests
from kvstow_service.replay.trace import Shape

if TYPE_CHECKING:
    from rich.progress import Progress

    from kvstow.config import EngineConfig
    from kvstow_service.replay.launcher import AttachedResult
    from kvstow_service.replay.ranks import ReplaySession
    from kvstow_service.replay.result import ReplayResult
    from kvstow_service.replay.trace import ReplayOptions, TraceRequest


def run_here(
    config: EngineConfig,
    options: ReplayOptions,
    requests: list[TraceRequest],
    blocks: int,
    shape: Shape | None,
    port: int | None,
) -> ReplayResult:
    """`shape`: None replays the control plane alone. `port`: None for no admin server."""
    from kvstow_service.replay.driver import ReplayDriver
    from kvstow_service.replay.offload import EmbeddedOffload
    from kvstow_service.replay.ranks import local_session, replay_admin, simulated_session

    with StopRequests() as stops, _progress() as progress, ExitStack() as stack:
        replayed = progress.add_task("replaying", total=len(requests), start=False)
        session: AbstractContextManager[ReplaySession]
        if shape is None:
            session = simulated_session(config)
        else:
            pinned = progress.add_task("pinning", total=config.capacity_slots)
            session = local_session(
                config,
                kv_blocks=blocks,
                shape=shape,
                stop=stops.requested,
                on_pinned=lambda slots: progress.update(pinned, completed=slots),
            )
        parts = stack.enter_context(session)
        if port is not None:
            stack.enter_context(replay_admin(parts, port))
        progress.start_task(replayed)
        driver = ReplayDriver(
            EmbeddedOffload(parts.engine),
            parts.workers,
            parts.kv,
            requests,
            options,
            kv_blocks=blocks,
            on_request=lambda count: progress.update(replayed, completed=count),
        )
        return driver.run(stops.requested)


def run_attached(
    path: Path,
    engines: int,
    shape: Shape,
    ranks: int,
    blocks: int,
    wanted_bytes: int,
    requests: list[TraceRequest],
    options: ReplayOptions,
) -> AttachedResult:
    from kvstow_service.replay.driver import check_fits
    from kvstow_service.replay.launcher import EngineLauncher, EngineSpec

    check_fits(requests, blocks)
    specs = [
        EngineSpec(f"replay-{number}", path, shape, ranks, blocks, wanted_bytes, requests, options)
        for number in range(1, engines + 1)
    ]
    with StopRequests() as stops, _progress() as progress:
        replayed = progress.add_task("replaying", total=len(requests) * engines)
        launcher = EngineLauncher(
            specs,
            on_request=lambda count: progress.update(replayed, completed=count),
            log=lambda line: click.echo(f"kvstow replay: {line}", err=True),
        )
        result = launcher.run(stops.requested)
    for engine in result.engines:
        if engine.problem is not None:
            click.echo(f"kvstow replay: {engine.name} was not attached at its end: {engine.problem}", err=True)
    return result


def _progress() -> Progress:
    """Progress bars on standard error, if it is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
