"""Many small ops leave nothing behind."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvstow.devices.base import TicketState
from kvstow.devices.cuda import CudaFence

_OPS = 10_000


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_ten_thousand_ops_take_no_memory(make_rank: Callable[..., Any], finish: Callable[[Any], TicketState]) -> None:
    rank = make_rank([4096, 1000, 8192], blocks=64, slots=64, threshold_bytes=8192, staging_bytes=32 << 10)
    stream, chance = torch.cuda.current_stream(), random.Random(0)

    def some_ops(count: int) -> None:
        for _ in range(count):
            number = chance.randint(1, 6)
            blocks, slots = chance.sample(range(64), number), chance.sample(range(64), number)
            fence = CudaFence.record(stream) if chance.random() < 0.5 else None
            op = rank.store(blocks, slots, fence) if chance.random() < 0.5 else rank.load(slots, blocks, fence)
            assert finish(op) is TicketState.DONE

    assert finish(rank.store(range(64), range(64))) is TicketState.DONE
    some_ops(1000)
    gc.collect()
    device, resident = torch.cuda.mem_get_info()[0], _resident_bytes()
    some_ops(_OPS)
    gc.collect()
    assert torch.cuda.mem_get_info()[0] == device
    assert _resident_bytes() - resident < 4 << 20
    assert finish(rank.store(range(64), range(64))) is TicketState.DONE
    np.testing.assert_array_equal(rank.slots(range(64)), rank.blocks(range(64)))
