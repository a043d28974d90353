"""Fences of CUDA streams."""

from __future__ import annotations

import torch

from kvstow.devices.cuda.context import Context, primary_context
from kvstow.devices.cuda.driver import Handle


class CudaFence:
    """Stands for the work that a stream held when the fence was recorded. Copies wait for it on the device.

    Thread-safe. The fence alone owns its event and never hands it out: code that may still query it or wait for it
    holds the fence. When the fence is collected, the event returns to the context's pool.
    """

    __slots__ = ("_context", "_event")

    def __init__(self, context: Context) -> None:
        """Not recorded; hosts call `record`."""
        self._context = context
        self._event = context.events.take()

    @classmethod
    def record(cls, stream: torch.cuda.Stream) -> CudaFence:
        """A fence after all work given to `stream` so far. Not while `stream` captures a graph."""
        context = primary_context(stream.device_index)
        with context.current():
            fence = cls(context)
            context.driver.record_event(fence._event, stream.cuda_stream)
        return fence

    def query(self) -> bool:
        with self._context.current():
            return self._context.driver.is_reached(self._event)

    def hold_back(self, stream: Handle) -> None:
        """Make work queued on `stream` from now on wait, on the device, for the fence. The caller has made the context
        current."""
        self._context.driver.wait_event(stream, self._event)

    def __del__(self) -> None:
        event = getattr(self, "_event", None)  # its creation may have failed
        if event is not None:
            self._context.events.give_back(event)
