"""vLLM's OpenAI server with KVStow, as processes of their own, while the pool is still being pinned."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
from tests.vllm.engines import (
    A_HIT,
    BLOCK,
    PROMPTS,
    SLOT_BYTES,
    A,
    Answer,
    Prompt,
    Reference,
    Setup,
    assert_same,
    eventually,
    transfer_config,
)

pytestmark = [pytest.mark.vllm, pytest.mark.process]

SLOTS = 16384
"""2 GiB, of which twenty slots a second are pinned: 13 minutes, which no test takes."""
ENOUGH_SLOTS = 240
"""For all that `PROMPTS` and their answers fill."""
PACE = {"pin_chunk": SLOT_BYTES, "pin_pause": 0.05}
START_SECONDS = 300.0
STEP_SECONDS = 120.0


class Server:
    """A running server; `admin` talks to the admin server in its engine's process."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, admin: Path, log: Path) -> None:
        self.process, self._log = process, log
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=STEP_SECONDS)
        transport = httpx.HTTPTransport(uds=str(admin))
        self.admin = httpx.Client(base_url="http://kvstow", transport=transport, timeout=STEP_SECONDS)

    def is_up(self, client: httpx.Client, path: str) -> bool:
        assert self.process.poll() is None, self._log.read_text()[-8000:]
        with suppress(httpx.TransportError):
            return client.get(path).status_code == 200
        return False

    def ask(self, tokens: Prompt) -> Answer:
        body = {
            "model": "tiny",
            "prompt": list(tokens),
            "max_tokens": 24,
            "temperature": 0,
            "logprobs": 5,
            "ignore_eos": True,
            "return_tokens_as_token_ids": True,
        }
        answer = self.client.post("/v1/completions", json=body).raise_for_status().json()
        logprobs = answer["choices"][0]["logprobs"]
        details = answer["usage"]["prompt_tokens_details"] or {"cached_tokens": 0}
        return Answer(
            tuple(map(_token, logprobs["tokens"])),
            tuple({_token(name): value for name, value in each.items()} for each in logprobs["top_logprobs"]),
            details["cached_tokens"],
        )

    def forget_gpu(self) -> None:
        """Empty the GPU's prefix cache, and only that; it says no while stores read its blocks."""

        def is_reset() -> bool:
            return self.client.post("/reset_prefix_cache").raise_for_status().json()["success"] is True

        eventually(is_reset, "a reset", STEP_SECONDS)

    def stats(self, section: str) -> dict[str, Any]:
        return dict(self.admin.get("/v1/stats", params={"section": section}).raise_for_status().json()[section])

    def is_pinning(self) -> bool:
        pool = self.stats("pool")
        return bool(pool["usable_slots"] < pool["capacity_slots"] == SLOTS)


def _token(name: str) -> int:
    return int(name.removeprefix("token_id:"))


@pytest.fixture(scope="module")
def server(model: Path, reference: Reference) -> Iterator[Server]:
    reference(model, A)  # before the server wants the processors
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="kvstow-")))
        with closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        setup = Setup(model, extra=PACE, slots=SLOTS)
        log = folder / "log"
        environ = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
        environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)),
            *("--model", str(model), "--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager"),
            *("--block-size", str(BLOCK), "--max-model-len", "1024", "--max-num-seqs", "8"),
            *("--num-gpu-blocks-override", "96", "--gpu-memory-utilization", "0.1", "--enable-prompt-tokens-details"),
            *("--kv-transfer-config", json.dumps(transfer_config(setup, folder / "admin"))),
        ]
        with log.open("wb") as output:
            process = subprocess.Popen(command, env=environ, stdout=output, stderr=subprocess.STDOUT)
        stack.callback(process.wait, STEP_SECONDS)
        stack.callback(process.send_signal, signal.SIGTERM)
        yield Server(process, port, folder / "admin", log)


def test_it_is_up_and_serves_while_the_pool_is_pinned(server: Server, model: Path, reference: Reference) -> None:
    expected = reference(model, A)
    eventually(lambda: server.is_up(server.client, "/health"), "health of vLLM", START_SECONDS)
    eventually(lambda: server.is_up(server.admin, "/readyz"), "readiness of KVStow", STEP_SECONDS)
    assert server.is_pinning()
    cold = server.ask(A)
    assert cold.cached == 0
    answers = [cold]

    def hits() -> bool:
        server.forget_gpu()
        answers.append(server.ask(A))
        return answers[-1].cached == A_HIT

    eventually(hits, "a hit in host memory", STEP_SECONDS)
    assert server.stats("transfers")["load"]["blocks"] > 0
    assert server.is_pinning()
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
    assert server.is_pinning()


def test_its_metrics_include_host_memory(server: Server) -> None:
    lines = server.client.get("/metrics").raise_for_status().text.splitlines()
    loaded = [float(line.split()[-1]) for line in lines if line.startswith("vllm:kv_offload_load_bytes_total")]
    assert sum(loaded) > 0
