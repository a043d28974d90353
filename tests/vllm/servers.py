"""vLLM's OpenAI server with KVStow, as processes of their own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.vllm.engines import BLOCK, Answer, Prompt, Setup, assert_same, eventually, transfer_config

START_SECONDS = 300.0
STEP_SECONDS = 120.0


class Server:
    """A running server; `admin` talks to the admin server in its engine's process, if there is one."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, admin_port: int, log: Path) -> None:
        self.process, self._log = process, log
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=STEP_SECONDS)
        self.admin = httpx.Client(base_url=f"http://127.0.0.1:{admin_port}", timeout=STEP_SECONDS)

    def close(self) -> None:
        self.client.close()
        self.admin.close()

    def is_up(self, client: httpx.Client, path: str) -> bool:
        assert self.process.poll() is None, self._log.read_text()[-20000:]
        with suppress(httpx.TransportError):
            return client.get(path).status_code == 200
        return False

    def ask(self, tokens: Prompt, engine: int | None = None, **fields: Any) -> Answer:
        """`engine`: which of several data-parallel engines answers. `fields`: more of the request's."""
        body = fields | {
            "model": "tiny",
            "prompt": list(tokens),
            "max_tokens": 24,
            "temperature": 0,
            "logprobs": 5,
            "ignore_eos": True,
            "return_tokens_as_token_ids": True,
        }
        headers = {} if engine is None else {"X-data-parallel-rank": str(engine)}
        answer = self.client.post("/v1/completions", json=body, headers=headers).raise_for_status().json()
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
        return dict(self.admin.get("/v1/stats").raise_for_status().json()[section])


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.text(max_size=300) | st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=4,
)
_HINTS = st.fixed_dictionaries(
    {},
    optional={
        "context": st.sampled_from(["trip", "walk"]) | _JSON,
        "resume_in": st.floats(0, 100) | _JSON,
        "release": st.booleans() | _JSON,
        "store": st.booleans() | _JSON,
        "priority": _JSON,
    },
)


def ask_with_all_kinds_of_hints(server: Server, tokens: Prompt, expected: Answer, engines: int = 1) -> None:
    """No hint changes an answer, or is an error."""

    @settings(max_examples=20, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(hints=_HINTS | _JSON, session=st.none() | st.text(max_size=300), engine=st.integers(0, engines - 1))
    def ask(hints: Any, session: str | None, engine: int) -> None:
        fields = {"kv_transfer_params": {"kvstow": hints}, "session_id": session}
        answer = server.ask(tokens, engine if engines > 1 else None, **fields)
        assert_same([answer], [expected])

    ask()


def _token(name: str) -> int:
    return int(name.removeprefix("token_id:"))


@contextmanager
def running_server(setup: Setup, folder: Path, *options: str) -> Iterator[Server]:
    """Returns while it starts. Its log is in `folder`."""
    with closing(socket.socket()) as free, closing(socket.socket()) as other:
        free.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        port, admin_port = free.getsockname()[1], other.getsockname()[1]
    log = folder / "log"
    environ = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    environ["VLLM_CPU_SIM_MULTI_NUMA"] = "0"  # unless it is set, vLLM 0.33 gives each data-parallel engine a NUMA node
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)),
        *("--model", str(setup.model), "--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager"),
        *("--block-size", str(BLOCK), "--max-model-len", "1024", "--max-num-seqs", "8"),
        *("--num-gpu-blocks-override", "96", "--gpu-memory-utilization", "0.1", "--enable-prompt-tokens-details"),
        *("--kv-transfer-config", json.dumps(transfer_config(setup, admin_port)), *options),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environ, stdout=output, stderr=subprocess.STDOUT)
    server = Server(process, port, admin_port, log)
    try:
        yield server
    finally:
        server.close()
        process.send_signal(signal.SIGTERM)
        process.wait(STEP_SECONDS)
