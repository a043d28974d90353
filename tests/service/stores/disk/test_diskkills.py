"""Kills of the service and of its child at random: what was written is found, and nothing wrong is ever read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

from tests.engine.tier.blockstorecontract import keys_of
from tests.service.stores.disk.diskwriter import BATCH, expected, open_store

ROUNDS = int(os.environ.get("KVSTOW_DISK_ROUNDS", "6"))
ROOT = Path(__file__).parents[4]


def run_and_kill(folder: Path, first: int, random: Random) -> list[int]:
    """The numbers of the blocks that were written before the kill."""
    command = [sys.executable, "-m", "tests.service.stores.disk.diskwriter", str(folder), str(first)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT) as writer:
        assert writer.stdout is not None
        child = int(writer.stdout.readline().split()[1])
        lines = [writer.stdout.readline() for _ in range(random.randrange(1, 20))]
        time.sleep(random.random() * 0.02)
        victims = [writer.pid, child]
        random.shuffle(victims)
        if random.random() < 0.3:
            os.kill(child, signal.SIGKILL)  # the writer goes on with the next one
            lines += [writer.stdout.readline() for _ in range(random.randrange(1, 10))]
            victims = [writer.pid]
        for pid in victims:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        lines += writer.stdout.readlines()
    complete = [line for line in lines if line.endswith("\n")]
    return [int(text) for line in complete for text in line.split()]


def test_what_was_written_before_a_kill_is_found_and_nothing_is_wrong(disk_folder: Path) -> None:
    random = Random(int(os.environ.get("KVSTOW_DISK_SEED", "1")))
    written: list[int] = []
    first = 0
    for _ in range(ROUNDS):
        written += run_and_kill(disk_folder, first, random)
        first = max([first, *written]) + 3 * BATCH
        store, client = open_store(disk_folder)
        try:
            recent = written[-3000:]
            found = wrong = 0
            for at in range(0, len(recent), BATCH):
                numbers = recent[at : at + BATCH]
                keys = [keys_of(range(number, number + 1))[0] for number in numbers]
                good, _ = client.move("read", keys, range(100, 100 + len(keys)))
                found += len(good)
                wrong += sum(client.bytes_in(slot) != expected(numbers[slot - 100]) for slot in good)
            assert wrong == 0
            assert store.parts()[0].counters.corrupt_blocks == 0
            assert found >= 0.99 * len(recent), (found, len(recent))
        finally:
            client.close()
            store.close()
