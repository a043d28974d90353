"""A prefiller and a decoder, each with NIXL's connector and KVStow in MultiConnector: both are vLLM's own classes, and
NIXL moves the bytes through UCX. Answers are those of one engine alone, whoever brings the KV."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.engineprocess import EngineProcess
from tests.vllm.engines import A_HIT, Answer, C, D, Prompt, Reference, assert_same, eventually

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("nixl") is None, reason="no NIXL: rm -r .venv-vllm-0.33.0 and make test-vllm"),
]

PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What a router puts into the request for the prefiller; its answer has what belongs into the one for the decoder."""


def _engine(model: Path, folder: Path, role: str) -> EngineProcess:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        "UCX_TLS": "tcp,self,sm",
    }
    nixl = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
    return EngineProcess(model, None, folder / role, environ, before=nixl)


class Pair:
    """Asks as a router does."""

    def __init__(self, prefiller: EngineProcess, decoder: EngineProcess) -> None:
        self.prefiller, self.decoder = prefiller, decoder

    def prefill(self, prompt: Prompt) -> Answer:
        (answer,) = self.prefiller.ask(prompt, tokens=1, transfer=PREFILL)
        assert answer.transfer is not None
        return answer

    def decode(self, prompt: Prompt, transfer: Mapping[str, Any] | None) -> Answer:
        (answer,) = self.decoder.ask(prompt, transfer=transfer)
        return answer

    def brought(self) -> float:
        """Tokens that the decoder got from any connector. vLLM tells its client what the prefiller had cached."""
        return self.decoder.metric("vllm:external_prefix_cache_hits")

    def loaded(self, engine: EngineProcess) -> int:
        return int(engine.stats("transfers")["load"]["blocks"])


@pytest.fixture(scope="module")
def pair(model: Path, reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    reference(model)  # before other engines are up
    folder = tmp_path_factory.mktemp("engines")
    with ExitStack() as stack:
        prefiller = _engine(model, folder, "kv_producer")
        stack.callback(prefiller.kill)
        decoder = _engine(model, folder, "kv_consumer")
        stack.callback(decoder.kill)
        yield Pair(prefiller, decoder)


def test_the_decoder_keeps_what_nixl_has_brought(pair: Pair, model: Path, reference: Reference) -> None:
    expected = reference(model, C)
    answer = pair.decode(C, pair.prefill(C).transfer)
    assert pair.brought() >= A_HIT, "NIXL has brought the prompt"
    assert pair.loaded(pair.decoder) == 0, "and not KVStow"
    assert_same([answer], expected)
    pair.decoder.forget_gpu()
    answer = pair.decode(C, None)
    assert answer.cached == A_HIT, "without the prefiller"
    assert pair.loaded(pair.decoder) > 0
    assert_same([answer], expected)


def test_nixl_wins_and_kvstow_lets_go_of_its_hit(pair: Pair, model: Path, reference: Reference) -> None:
    """All connectors are asked, and the first with tokens is chosen: what KVStow has found is leased for nothing."""
    expected = reference(model, D)
    pair.decode(D, pair.prefill(D).transfer)
    pair.decoder.forget_gpu()
    pair.prefiller.forget_gpu()
    loaded, brought = pair.loaded(pair.decoder), pair.brought()
    answer = pair.decode(D, pair.prefill(D).transfer)
    assert pair.brought() - brought >= A_HIT
    assert pair.loaded(pair.decoder) == loaded
    assert_same([answer], expected)
    assert pair.decoder.stats("pool")["slots"]["cached"] > 0
    eventually(lambda: pair.decoder.stats("pool")["slots"]["leased"] == 0, "the end of all leases")


def test_the_prefiller_sends_what_kvstow_has_loaded(pair: Pair, model: Path, reference: Reference) -> None:
    """Its own GPU and the decoder's memory have nothing of the prompt any more."""
    expected = reference(model, C)
    pair.prefill(C)
    pair.prefiller.forget_gpu()
    before = pair.loaded(pair.prefiller)
    told = pair.prefill(C)
    assert told.cached == A_HIT
    assert pair.loaded(pair.prefiller) > before
    pair.decoder.forget_gpu()
    assert_same([pair.decode(C, told.transfer)], expected)
