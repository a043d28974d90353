"""The probes of one server. Liveness checks only what a restart repairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvstow_api.conditions.gathering import Conditions
from kvstow_api.host import ApiHost, HealthCheck
from kvstow_api.probe import Check, Probe


class Health:
    """The probes `livez`, `readyz` and `startupz` of one server. `process`: checks of the host's own process."""

    def __init__(self, host: ApiHost, process: list[Check], conditions: Conditions) -> None:
        answering = Check("server", lambda: None)
        self.probes: Mapping[str, Probe] = {
            "livez": Probe("livez", [answering, *host_checks(host.live_checks)]),
            "readyz": Probe("readyz", [*_told_by_conditions(host), *process], conditions.failures),
            "startupz": Probe("startupz", [answering, *host_checks(host.startup_checks)]),
        }


def host_checks(checks: Mapping[str, HealthCheck]) -> list[Check]:
    return [Check(name, failure) for name, failure in checks.items()]


def _told_by_conditions(host: ApiHost) -> Iterator[Check]:
    """A fault of one engine fails no probe of a node, because the service still serves the others. One that only a
    restart of the service repairs does. Nothing depends on the tier: requests compute what its store has."""
    is_node, require = host.directory.is_node, host.readiness_require
    yield Check("engine")
    if is_node:
        yield Check("memory")
    yield Check("pool", required="pool" in require)
    yield Check("pinned", required="pinned" in require)
    yield Check("ranks", required=not is_node)
    yield Check("transfers", required=not is_node)
    if host.directory.tier is not None:
        yield Check("tier", required=False)
