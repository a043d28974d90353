"""The probes of one server. Liveness checks only what a restart repairs."""

from __future__ import annotations

from collections.abc import Mapping

from kvstow_api.host import ApiHost, HealthCheck
from kvstow_api.looplag import LoopMonitor
from kvstow_api.probe import Check, Probe
from kvstow_api.readychecks import checks_of


class Health:
    """The probes `livez`, `readyz` and `startupz` of one server. The start-up grace begins when it is created."""

    def __init__(self, host: ApiHost, loop: LoopMonitor) -> None:
        ready = [*checks_of(host), Check("loop", loop.failure)]
        answering = Check("server", lambda: None)
        self.probes: Mapping[str, Probe] = {
            "livez": Probe("livez", [answering, *_host_checks(host.live_checks)]),
            "readyz": Probe("readyz", [*ready, *_host_checks(host.ready_checks)]),
            "startupz": Probe("startupz", [answering, *_host_checks(host.startup_checks)]),
        }


def _host_checks(checks: Mapping[str, HealthCheck]) -> list[Check]:
    return [Check(name, failure) for name, failure in checks.items()]
