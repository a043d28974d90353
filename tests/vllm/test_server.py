"""vLLM's OpenAI server with KVStow, as processes of their own, while the pool is still being pinned."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from tests.vllm.engines import A_HIT, PROMPTS, SHORT, SLOT_BYTES, A, Reference, Setup, assert_same, eventually
from tests.vllm.servers import START_SECONDS, STEP_SECONDS, Server, ask_with_all_kinds_of_hints, running_server

pytestmark = [pytest.mark.vllm, pytest.mark.process]

SLOTS = 16384
"""2 GiB, of which twenty slots a second are pinned: 13 minutes, which no test takes."""
ENOUGH_SLOTS = 240
"""For all that `PROMPTS` and their answers fill."""
MIDDLEWARE = "kvstow_service.connectors.middleware.HintsInBodies"
PACE = {"pin_chunk": SLOT_BYTES, "pin_pause": 0.05}


@pytest.fixture(scope="module")
def server(model: Path, reference: Reference) -> Iterator[Server]:
    reference(model, A)  # before the server wants the processors
    with (
        TemporaryDirectory(prefix="kvstow-") as folder,
        running_server(Setup(model, extra=PACE, slots=SLOTS), Path(folder), "--middleware", MIDDLEWARE) as server,
    ):
        yield server


def is_pinning(server: Server) -> bool:
    pool = server.stats("pool")
    return bool(pool["usable_slots"] < pool["capacity_slots"] == SLOTS)


def test_it_is_up_and_serves_while_the_pool_is_pinned(server: Server, model: Path, reference: Reference) -> None:
    expected = reference(model, A)
    eventually(lambda: server.is_up(server.client, "/health"), "health of vLLM", START_SECONDS)
    eventually(lambda: server.is_up(server.admin, "/readyz"), "readiness of KVStow", STEP_SECONDS)
    assert is_pinning(server)
    cold = server.ask(A)
    assert cold.cached == 0
    answers = [cold]

    def hits() -> bool:
        server.forget_gpu()
        answers.append(server.ask(A))
        return answers[-1].cached == A_HIT

    eventually(hits, "a hit in host memory", STEP_SECONDS)
    assert server.stats("transfers")["load"]["blocks"] > 0
    assert is_pinning(server)
    assert_same(answers, len(answers) * expected)
    assert server.is_up(server.client, "/health")
    assert server.is_up(server.admin, "/readyz")


def test_clients_at_once(server: Server, model: Path, reference: Reference) -> None:
    expected = reference(model, *PROMPTS)
    eventually(lambda: server.is_up(server.client, "/health"), "health of vLLM", START_SECONDS)
    eventually(lambda: server.stats("pool")["usable_slots"] >= ENOUGH_SLOTS, "enough slots", STEP_SECONDS)
    loaded = server.stats("transfers")["load"]["blocks"]
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        for _ in range(3):
            answers = list(clients.map(server.ask, PROMPTS))
            assert_same(answers, expected)
            server.forget_gpu()
    assert server.stats("transfers")["load"]["blocks"] > loaded
    assert min(answer.cached for answer in answers) > 0
    assert is_pinning(server)


def test_hints_of_all_kinds_change_no_answer(server: Server, model: Path, reference: Reference) -> None:
    (expected,) = reference(model, SHORT[0])
    eventually(lambda: server.is_up(server.client, "/health"), "health of vLLM", START_SECONDS)
    ask_with_all_kinds_of_hints(server, SHORT[0], expected)
    ignored = server.stats("hints_ignored")
    assert ignored["invalid"] > 0
    assert ignored["unknown"] > 0
    assert server.is_up(server.admin, "/readyz")


def test_hints_in_the_words_of_others_reach_the_pool(server: Server, model: Path, reference: Reference) -> None:
    (expected,) = reference(model, SHORT[1])
    eventually(lambda: server.is_up(server.client, "/health"), "health of vLLM", START_SECONDS)

    def contexts() -> int:
        return int(server.admin.get("/v1/contexts").raise_for_status().json()["total"])

    known, ignored = contexts(), server.stats("hints_ignored")["invalid"]
    answer = server.ask(SHORT[1], prompt_cache_key="others", cache_control={"type": "ephemeral", "ttl": "1h"})
    assert_same([answer], [expected])
    eventually(lambda: contexts() == known + 1, "a context", STEP_SECONDS)
    assert server.stats("hints_ignored")["invalid"] == ignored
    assert_same([server.ask(SHORT[1], nvext="no object")], [expected])
    eventually(lambda: server.stats("hints_ignored")["invalid"] == ignored + 1, "a count", STEP_SECONDS)


def test_its_metrics_include_host_memory(server: Server) -> None:
    lines = server.client.get("/metrics").raise_for_status().text.splitlines()
    loaded = [float(line.split()[-1]) for line in lines if line.startswith("vllm:kv_offload_load_bytes_total")]
    assert sum(loaded) > 0
