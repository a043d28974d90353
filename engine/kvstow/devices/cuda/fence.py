"""Fences of CUDA streams."""

from __future__ import annotations

import weakref

import torch

from kvstow.devices.cuda.context import Context, primary_context
from kvstow.devices.cuda.driver import Handle


class CudaFence:
    """Names the work that a stream held when the fence was recorded. Copies wait for it on the device.

    Thread-safe. The event lives as long as the fence.
    """

    def __init__(self, context: Context, event: Handle) -> None:
        """Takes over `event`, which is recorded; hosts call `record`."""
        self.event = event
        self._context = context
        weakref.finalize(self, context.driver.destroy_event, event).atexit = False

    @classmethod
    def record(cls, stream: torch.cuda.Stream) -> CudaFence:
        """A fence after all work given to `stream` so far. Not while `stream` captures a graph."""
        context = primary_context(stream.device_index)
        with context.current():
            fence = cls(context, context.driver.create_event(timing=False))
            context.driver.record_event(fence.event, stream.cuda_stream)
        return fence

    def query(self) -> bool:
        with self._context.current():
            return self._context.driver.is_reached(self.event)
