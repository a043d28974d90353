"""The description holds for whatever is asked: generated requests, good and bad, against a live service."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi import checks

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow_api.app import create_app
from kvstow_api.directory import EmbeddedDirectory
from kvstow_api.host import ApiHost

EXAMPLES = [3, pytest.param(30, marks=pytest.mark.soak)]  # of each kind
PROBES = ("/readyz", "/health", "/healthz")
PROBE_CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
]
CHECKS = [not_a_server_error, *PROBE_CHECKS]  # a failing probe is no failing server


def describe() -> dict[str, Any]:
    engine = OffloadEngine(EngineConfig(slot_bytes=4096, capacity_slots=16))
    return create_app(ApiHost(directory=EmbeddedDirectory(engine, 16), version="1.2.3", mode="test")).openapi()


def _has_rules(operation: Any) -> bool:
    return bool(operation.query or operation.body)


SCHEMA = schemathesis.openapi.from_dict(describe())
OPERATIONS = {
    operation.label: operation
    for operation in (result.ok() for result in SCHEMA.get_all_operations() if isinstance(result, Ok))
    if operation.path not in ("/v1/events", "/v1/pools/{pool}/trace")  # they last; tests of their own read them
}


POSITIVE = [(label, GenerationMode.POSITIVE) for label in OPERATIONS]
# Where there is only text in a path, nothing is wrong enough.
NEGATIVE = [(label, GenerationMode.NEGATIVE) for label, operation in OPERATIONS.items() if _has_rules(operation)]


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize(("label", "mode"), [*POSITIVE, *NEGATIVE])
def test_answers_are_as_described(busy_url: str, label: str, mode: GenerationMode, examples: int) -> None:
    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=OPERATIONS[label].as_strategy(generation_mode=mode))
    def check(case: Case[Any]) -> None:
        answer = case.call(base_url=busy_url, timeout=20)
        case.validate_response(answer, checks=PROBE_CHECKS if case.operation.path in PROBES else CHECKS)

    check()
