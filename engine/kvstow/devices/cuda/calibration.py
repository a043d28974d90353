"""Measures, in about 50 ms at start, from which page size on direct copies are as fast as large ones."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack

import numpy as np

from kvstow.devices.cuda.batchresources import Timer, new_stream
from kvstow.devices.cuda.driver import AccessOrder, Driver

CANDIDATES = (256 << 10, 512 << 10, 1 << 20, 2 << 20)  # bytes; smaller ones reach 85 % at best
NEVER = 1 << 62  # larger than any page

_BYTES = 32 << 20
_REPEATS = 3
_ENOUGH = 0.97  # of the large-copy rate

logger = logging.getLogger("kvstow.cuda")


def direct_threshold(driver: Driver) -> int:
    """The smallest page size, in bytes, that is worth copying directly. Waits for the device, and uses 32 MiB of its
    memory and of pinned host memory meanwhile."""
    with ExitStack() as undo:
        probe = _Probe(driver, undo)
        large = probe.seconds(_BYTES)
        ratios = {page: large / probe.seconds(page) for page in CANDIDATES}
    logger.info("direct copies reach, by page size, %s of the large-copy rate", ratios)
    return choose_threshold(ratios)


def choose_threshold(ratios: Mapping[int, float]) -> int:
    """The smallest page size from which on every ratio is high enough."""
    threshold = NEVER
    for page, ratio in sorted(ratios.items(), reverse=True):
        if ratio < _ENOUGH:
            break
        threshold = page
    return threshold


class _Probe:
    """Times copies of scattered pages between its own device and host memory."""

    def __init__(self, driver: Driver, undo: ExitStack) -> None:
        self._driver = driver
        self._device = driver.allocate(_BYTES)
        undo.callback(driver.free, self._device)
        self._host = driver.allocate_host(_BYTES)
        undo.callback(driver.free_host, self._host)
        self._stream, self._timer = new_stream(driver, undo), Timer(driver, undo)

    def seconds(self, page: int) -> float:
        """The best time to copy all pages to the host and back."""
        return sum(min(self._once(page, order) for _ in range(_REPEATS)) for order in ("stream", "any"))

    def _once(self, page: int, order: AccessOrder) -> float:
        places = np.arange(0, _BYTES, page)
        device, host = self._device + np.random.default_rng(0).permutation(places), self._host + places
        target, source = (host, device) if order == "stream" else (device, host)
        self._timer.start(self._stream)
        self._driver.copy(target, source, np.full(len(places), page), order, self._stream)
        self._timer.stop(self._stream)
        self._driver.synchronize(self._stream)
        return self._timer.take()
