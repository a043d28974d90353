"""Data-parallel engines of one vLLM server, attached to a node service: what one has stored, the other one finds."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.vllm.engines import A_BLOCKS, A_HIT, SHORT, A, Reference, Setup, assert_same, eventually
from tests.vllm.nodeservice import is_attached, running_service
from tests.vllm.servers import START_SECONDS, STEP_SECONDS, ask_with_all_kinds_of_hints, running_server

pytestmark = [pytest.mark.vllm, pytest.mark.process]


def test_all_engines_of_a_server_have_one_pool(model: Path, reference: Reference, tmp_path: Path) -> None:
    expected, (short,) = reference(model, A), reference(model, SHORT[0])
    (tmp_path / "server").mkdir()
    with running_service(tmp_path) as service:
        setup = Setup(model, {"attach": service.attach})
        with running_server(setup, tmp_path / "server", "--data-parallel-size", "2") as server:
            eventually(lambda: server.is_up(server.client, "/health"), "health of vLLM", START_SECONDS)
            eventually(lambda: is_attached(service, 2), "two attached engines", STEP_SECONDS)
            first, second = service.sessions()
            assert first["engine"] != second["engine"]
            assert (first["pool"], first["namespace"]) == (second["pool"], second["namespace"])
            cold = server.ask(A, engine=0)
            assert cold.cached == 0
            eventually(lambda: service.used_slots() >= A_BLOCKS, "the end of all stores", STEP_SECONDS)
            warm = server.ask(A, engine=1)
            assert warm.cached == A_HIT, "its first request hits"
            assert_same([cold, warm], 2 * expected)
            assert service.used_slots() <= 1.05 * (A_BLOCKS + 1)
            ask_with_all_kinds_of_hints(server, SHORT[0], short, engines=2)
            pool = first["pool"]
            eventually(
                lambda: service.get(f"/v1/stats?pool={pool}")["hints_ignored"]["invalid"], "counts", STEP_SECONDS
            )
            assert service.is_ready()
            assert is_attached(service, 2), "no hint has ended a session"
            assert service.sessions()[0]["id"] == first["id"]
