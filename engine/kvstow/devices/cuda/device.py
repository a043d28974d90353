"""The CUDA device: moves blocks between torch tensors on a GPU and a pool of registered host memory.

At start it measures, in about 50 ms, from which page size on direct copies are as fast as large ones."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from kvstow.config import COPY_STRATEGIES, CopyStrategy
from kvstow.devices.base import Fence, checked, checked_slots
from kvstow.devices.cuda.context import CudaRegistrar, Timer, new_stream, primary_context
from kvstow.devices.cuda.copier import Copier, PageKernels, Transfer
from kvstow.devices.cuda.driver import AccessOrder, Driver, Handle, Int64Array
from kvstow.devices.cuda.layerloader import CudaLayeredLoad, LayerLoader
from kvstow.devices.cuda.plan import Split
from kvstow.errors import ConfigError, CopyError
from kvstow.layout import KVLayout, Part
from kvstow.memory.slotpool import SlotPool
from kvstow.messages import LayerFigures

logger = logging.getLogger("kvstow.cuda")

CANDIDATES = (256 << 10, 512 << 10, 1 << 20, 2 << 20)
"""Page sizes, in bytes, that are measured. Smaller pages reach 85 % of the large-copy rate at best."""
NEVER = 1 << 62
"""A threshold in bytes that no page reaches."""
_BYTES = 32 << 20
"""Bytes that a measurement copies in each direction."""
_REPEATS = 3
"""How often each measurement is made; the shortest time counts."""
_ENOUGH = 0.97
"""Pages that reach this share of the large-copy rate are copied directly."""


@dataclass(frozen=True, slots=True)
class CudaOptions:
    """How bytes travel. Sizes in bytes.

    `strategy`: "staged" packs pages on the device and copies whole blocks, "direct" copies page by page, "auto"
    decides per region by its page size: direct from `threshold_bytes` on, which is measured when it is None.
    `staging_bytes`: the size of a batch and of a staging buffer, which hold at least one block.
    `num_buffers`: staging buffers per direction, and also the batches of stores that are queued at a time. Another copy
    to the host, such as that of a sampled token, may have to wait for all of these.
    `loads_ahead`: batches of loads that are queued at a time. They take turns with the buffers, and the device orders
    them itself, so the link stays busy while the host's interpreter is. Other copies to the device do not wait for
    them.
    `loads_per_advance`: how many batches of loads one `advance` may add to those under way. The host's thread may pay
    for them within a step: 50 us each, 0.8 ms by default. They keep the link busy for 14 ms, until the next call.
    """

    strategy: CopyStrategy = "auto"
    threshold_bytes: int | None = None
    staging_bytes: int = 48 << 20
    num_buffers: int = 2
    loads_ahead: int = 64
    loads_per_advance: int = 16

    def __post_init__(self) -> None:
        if self.strategy not in COPY_STRATEGIES:
            raise ConfigError("strategy", self.strategy, " or ".join(COPY_STRATEGIES))
        for key in ("staging_bytes", "num_buffers", "loads_ahead", "loads_per_advance", "threshold_bytes"):
            value = getattr(self, key)
            if (type(value) is not int or value < 1) and not (key == "threshold_bytes" and value is None):
                raise ConfigError(key, value, "a whole number, 1 or more")


class CudaDevice:
    """Moves blocks between `tensors` and `pool`; protocol and ordering in `kvstow.devices.base`.

    `tensors[i]` is region `i` of `layout` as uint8 `[num_blocks, page_bytes]` on one GPU, with dense rows and any
    stride between them. They are written and read in place; the caller keeps them alive. The pool is borrowed;
    `registrar` is the one that pins it.

    Ops of a direction run in the order of their launch. The device waits for a `CudaFence`. `advance` queries any other
    fence; until it is reached, it delays the later ops of its direction.
    """

    copies_alone = True

    def __init__(
        self,
        pool: SlotPool,
        layout: KVLayout,
        tensors: Sequence[torch.Tensor],
        *,
        registrar: CudaRegistrar,
        options: CudaOptions | None = None,
        parts: Sequence[Part] | None = None,
    ) -> None:
        """`parts`: the parts that loads by layer copy one after the other; None if there are no such loads. Allocates
        the staging buffers on the device, and may calibrate (`CudaOptions`). Raises `ConfigError`,
        `DriverUnavailableError` and `DriverError`, and then leaves nothing behind."""
        layout.require(pool.slot_bytes, len(tensors))
        for region, tensor in zip(layout.regions, tensors, strict=True):
            if tensor.device.type != "cuda" or tensor.device != tensors[0].device:
                raise ConfigError(f"region {region.name}", str(tensor.device), "one cuda device for all regions")
            region.require(str(tensor.dtype).removeprefix("torch."), tensor.shape, tensor.stride())
        if pool.status().pin_mode != registrar.mode:
            raise ConfigError("lock", False, "true: CUDA copies from registered memory only")
        self._pool, self._registrar, self._num_blocks = pool, registrar, layout.num_blocks
        self._context = primary_context(tensors[0].device.index)
        self.name = f"cuda:{self._context.ordinal}"
        self._closed = False
        if parts is not None:
            layout.require_parts(parts)
        self.num_parts = len(parts or ())
        self._layout, self._bases = layout, [tensor.data_ptr() for tensor in tensors]
        options, driver = options or CudaOptions(), self._context.driver
        with self._context.current(), ExitStack() as undo:
            direct = _direct_regions(driver, layout, options)
            split = self._split = Split(layout, self._bases, direct, options.staging_bytes)
            kernels = PageKernels(self._context, split.pieces, split.staged_bytes, undo) if split.staged_bytes else None
            buffers = options.num_buffers
            make = partial(Copier, driver, split, kernels, num_buffers=buffers, undo=undo)
            self._stores = make(stores=True, batches_ahead=buffers, per_advance=buffers)
            self._loads = make(stores=False, batches_ahead=options.loads_ahead, per_advance=options.loads_per_advance)
            self._layers = None
            if parts is not None:
                self._layers = LayerLoader(self._context, layout, self._bases, parts, self._compute_stream, undo)
            self._undo = undo.pop_all()

    def launch_store(self, op_id: int, blocks: Sequence[int], slots: Sequence[int], after: Fence | None) -> Transfer:
        transfer = self._planned(blocks, slots, after)
        self._stores.queue(transfer)
        return transfer

    def launch_load(self, op_id: int, blocks: Sequence[int], slots: Sequence[int], after: Fence | None) -> Transfer:
        transfer = self._planned(blocks, slots, after)
        self._loads.queue(transfer)
        return transfer

    def load_layers(self, blocks: Sequence[int], slots: Sequence[int], after: Fence | None) -> CudaLayeredLoad:
        assert self._layers is not None
        targets, places = self._checked(blocks, slots)
        addresses = self._pool.addresses(places)
        with self._context.current():
            return self._layers.load(targets, addresses, after)

    @property
    def layer_figures(self) -> LayerFigures:
        return LayerFigures() if self._layers is None else self._layers.figures

    def load_now(self, blocks: Sequence[int], slots: Sequence[int], after: Fence | None) -> None:
        assert self._layers is not None
        targets, places = self._checked(blocks, slots)
        addresses = self._pool.addresses(places)
        rows = list(zip(self._bases, self._layout.regions, self._layout.offsets, strict=True))
        device = np.concatenate([base + targets * region.stride_bytes for base, region, _ in rows])
        host = np.concatenate([addresses + offset for _, _, offset in rows])
        size = np.repeat(np.array([region.page_bytes for _, region, _ in rows], np.int64), len(targets))
        with self._context.current():
            self._layers.copy_now(device, host, size, after)

    def _compute_stream(self) -> Handle:
        """The stream of `torch.cuda.current_stream`, without the object that it makes, which costs 5 us per layer."""
        return torch._C._cuda_getCurrentRawStream(self._context.ordinal)

    def advance(self) -> None:
        if not self._closed:
            with self._context.current():
                if self._layers is not None:
                    self._layers.advance()
                self._loads.advance()  # first: a request waits for a load, and nothing waits for a store
                self._stores.advance()

    def close(self) -> None:
        """Also waits for the fences of copies under way. Raises `DriverError` after trying everything."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as context, ExitStack() as rest:
            rest.push(self._undo)
            if self._layers is not None:
                rest.callback(self._layers.drain)
            rest.callback(self._loads.drain)
            rest.callback(self._stores.drain)
            context.enter_context(self._context.current())

    def _planned(self, blocks: Sequence[int], slots: Sequence[int], after: Fence | None) -> Transfer:
        """An op with everything its batches need. No copier has it yet, so an error leaves nothing behind."""
        targets, places = self._checked(blocks, slots)
        order = np.argsort(places)  # consecutive slots are copied in one piece
        targets, addresses, seams = targets[order], self._pool.addresses(places[order]), self._registrar.starts()
        staged = self._split.staged_copies(addresses, seams)
        direct = self._split.direct_copies(targets, addresses, seams)
        return Transfer(targets, self._split.num_batches(len(targets)), staged, direct, after)

    def _checked(self, blocks: Sequence[int], slots: Sequence[int]) -> tuple[Int64Array, Int64Array]:
        if self._closed:
            raise CopyError("the device is closed")
        return checked("blocks", blocks, self._num_blocks), checked_slots(self._pool, slots, blocks)


def _direct_regions(driver: Driver, layout: KVLayout, options: CudaOptions) -> list[bool]:
    """For each region, whether it is copied directly."""
    pages = [region.page_bytes for region in layout.regions]
    if options.strategy != "auto":
        return [options.strategy == "direct"] * len(pages)
    threshold = options.threshold_bytes
    if threshold is None:
        threshold = direct_threshold(driver) if max(pages) >= min(CANDIDATES) else max(pages) + 1
    direct = [page >= threshold for page in pages]
    logger.info("%d of %d regions are copied directly, the others staged", sum(direct), len(pages))
    return direct


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
