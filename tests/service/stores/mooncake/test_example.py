"""The arguments of helm/examples/mooncake.yaml make a store that KVStow uses."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helm import examples
from tests.service.stores.mooncake.clientcontract import TIMEOUT, ClientContract, Slots
from tests.waiting import eventually

from kvstow_service.stores.mooncake.mooncakestore import MooncakeLocation, MooncakeStore
from kvstow_service.stores.mooncake.objects import MooncakeClients, ObjectName, TransferClient

pytestmark = pytest.mark.tier

POD_IP = "127.0.0.2"  # other tests have Mooncake's ports at 127.0.0.1
PORT = 19_051
"""Instead of 50051, which the kernel may give to an outgoing connection of another test."""
SEGMENT = 1 << 30


def command(name: str) -> list[str]:
    """Of the only container, with what Kubernetes and its DNS would put in, another port, and less memory."""
    program, *arguments = examples.container("mooncake.yaml", "Deployment", name)["args"]
    given = [one.replace("$(POD_IP)", POD_IP).replace("=mooncake-master:", f"={POD_IP}:") for one in arguments]
    assert (name == "mooncake-provider") == ("--global_segment_size=64GB" in given)
    assert sum("50051" in one for one in given) == 1
    changed = [one.replace("=64GB", f"={SEGMENT}").replace("50051", str(PORT)) for one in given]
    return [str(Path(sys.executable).with_name(program)), *changed]


def ask(path: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        return str(opener.open(f"http://{POD_IP}:9003{path}", timeout=10).read().decode())
    except OSError:
        return ""


class TestTheExample:
    slots = ClientContract.slots
    transfers = ClientContract.transfers
    name = ClientContract.name

    @pytest.fixture
    def start(self, alone: None, tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[Any]]]:
        processes: list[subprocess.Popen[Any]] = []

        def run(name: str) -> subprocess.Popen[Any]:
            with (tmp_path / f"{name}.log").open("ab") as log:
                processes.append(subprocess.Popen(command(name), stdout=log, stderr=log, cwd=tmp_path))
            return processes[-1]

        yield run
        for process in processes:
            process.kill()
            process.wait()

    @pytest.fixture
    def tier(self, start: Callable[[str], subprocess.Popen[Any]]) -> MooncakeClients:
        start("mooncake-master")
        eventually(lambda: '"service_ready":true' in ask("/health"), "a master that serves", seconds=60)
        provider: list[subprocess.Popen[Any]] = []

        def has_memory() -> bool:
            """Mooncake picks its ports at random, so a provider may end; Kubernetes would start it again."""
            if not provider or provider[-1].poll() is not None:
                assert len(provider) < 3, "providers end"
                provider.append(start("mooncake-provider"))
            return f"master_total_capacity_bytes {SEGMENT}" in ask("/metrics")

        eventually(has_memory, "a provider's memory", seconds=120)
        return MooncakeStore(MooncakeLocation.parse(f"mooncake://{POD_IP}:{PORT}?host=127.0.0.1"))

    def test_kvstow_puts_and_gets_a_block(
        self, transfers: TransferClient, slots: Slots, name: Callable[..., ObjectName]
    ) -> None:
        assert json.loads(ask("/health"))["role"] == "leader"
        assert transfers.put([slots.object(name(1), 1)], TIMEOUT) == ["stored"]
        assert transfers.get([slots.object(name(1), 5)], TIMEOUT) == ["found"]
        assert slots.read(5) == slots.read(1)
