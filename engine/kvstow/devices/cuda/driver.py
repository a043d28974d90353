"""The one file that calls the CUDA driver and NVRTC, each call checked in one place.

Only the driver API is used: its errors do not stick to the process as those of the runtime API do, so torch keeps
working after one. Handles are opaque objects of cuda-bindings; addresses, sizes and counts are ints. Unless a
method says otherwise, the caller has made the context current (`Context.current`), and no method waits.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib import import_module
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvstow.errors import KvstowError

Handle = Any  # a context, stream, event, module or function, as cuda-bindings makes them
Int64Array = npt.NDArray[np.int64]
AccessOrder = Literal["stream", "any"]

_OLDEST = 12080  # cuMemcpyBatchAsync came with CUDA 12.8
_SUCCESS, _OUT_OF_MEMORY, _NOT_READY = 0, 2, 600
_STREAM_NON_BLOCKING, _EVENT_NO_TIMING, _HOST_PORTABLE, _HOST_PORTABLE_MAPPED = 1, 2, 1, 1 | 2
_CAPTURE_RELAXED = 2
_COMPUTE_MAJOR, _COMPUTE_MINOR, _HOST_NUMA_ID = 75, 76, 134  # CU_DEVICE_ATTRIBUTE_*


class DriverError(KvstowError, code="driver_error"):
    """A call of the CUDA driver failed; `name` and `text` are the driver's own."""

    def __init__(self, call: str, status: int, name: str, text: str) -> None:
        super().__init__(f"{call} failed: {name} ({status}): {text}")
        self.call, self.status, self.name, self.text = call, status, name, text

    @property
    def is_out_of_memory(self) -> bool:
        return self.status == _OUT_OF_MEMORY


class DriverUnavailableError(KvstowError, code="driver_unavailable"):
    """CUDA cannot be used here at all: no cuda-bindings, no driver, or one that is too old."""


@cache
def load_driver() -> Driver:
    """The process's driver. Raises `DriverUnavailableError`; a later call tries again."""
    try:
        cu, nvrtc = import_module("cuda.bindings.driver"), import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        raise DriverUnavailableError(
            f"the CUDA device needs the package cuda-bindings, 12.8 or newer: {error}"
        ) from error
    return Driver(cu, nvrtc)


class Driver:
    """`cu` and `nvrtc` are the modules of cuda-bindings, or doubles of them. Thread-safe: it holds no state."""

    def __init__(self, cu: Any, nvrtc: Any) -> None:
        self._cu, self._nvrtc = cu, nvrtc
        self.version = self._start()
        self._copy_batch = self._find_batch_copy()

    # Contexts and threads.

    def retain_primary_context(self, ordinal: int) -> Handle:
        return self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", ordinal))

    def push_context(self, context: Handle) -> None:
        self._call("cuCtxPushCurrent", context)

    def pop_context(self) -> None:
        self._call("cuCtxPopCurrent")

    def relax_capture(self) -> Handle:
        """Allow this thread calls that a graph capture of another thread would forbid. Returns the previous mode."""
        return self.exchange_capture_mode(self._cu.CUstreamCaptureMode(_CAPTURE_RELAXED))

    def exchange_capture_mode(self, mode: Handle) -> Handle:
        return self._call("cuThreadExchangeStreamCaptureMode", mode)

    def compute_capability(self, ordinal: int) -> tuple[int, int]:
        device = self._call("cuDeviceGet", ordinal)
        attribute = self._cu.CUdevice_attribute
        major = self._call("cuDeviceGetAttribute", attribute(_COMPUTE_MAJOR), device)
        return int(major), int(self._call("cuDeviceGetAttribute", attribute(_COMPUTE_MINOR), device))

    def host_numa_node(self, ordinal: int) -> int | None:
        """The host's NUMA node nearest to the GPU; None if there is none or it is unknown."""
        try:
            attribute = self._cu.CUdevice_attribute(_HOST_NUMA_ID)
            node = int(self._call("cuDeviceGetAttribute", attribute, self._call("cuDeviceGet", ordinal)))
        except (ValueError, DriverError):  # cuda-bindings or a driver that does not know the attribute
            return None
        return node if node >= 0 else None

    # Streams and events.

    def create_stream(self, *, urgent: bool) -> Handle:
        """A stream that the default stream does not wait for, of the highest priority if `urgent`, else of the default
        priority."""
        _, highest = self._call("cuCtxGetStreamPriorityRange")
        return self._call("cuStreamCreateWithPriority", _STREAM_NON_BLOCKING, highest if urgent else 0)

    def destroy_stream(self, stream: Handle) -> None:
        self._call("cuStreamDestroy", stream)

    def synchronize(self, stream: Handle) -> None:
        """Wait until the stream is idle."""
        self._call("cuStreamSynchronize", stream)

    def is_idle(self, stream: Handle) -> bool:
        """Whether all work given to the stream is done."""
        return self._is_done("cuStreamQuery", stream)

    def wait_event(self, stream: Handle, event: Handle) -> None:
        """Make work queued on `stream` from now on wait, on the device, for what `event` has recorded."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def create_event(self, *, timing: bool) -> Handle:
        return self._call("cuEventCreate", 0 if timing else _EVENT_NO_TIMING)

    def destroy_event(self, event: Handle) -> None:
        """Needs no current context. The device need not have reached the event."""
        self._call("cuEventDestroy", event)

    def record_event(self, event: Handle, stream: Handle) -> None:
        self._call("cuEventRecord", event, stream)

    def is_reached(self, event: Handle) -> bool:
        """Whether the device has reached the event. Also true of an event that was never recorded."""
        return self._is_done("cuEventQuery", event)

    def seconds_between(self, start: Handle, end: Handle) -> float:
        """Seconds between two events that were made with timing and are reached. The resolution is 0.5 us."""
        return float(self._call("cuEventElapsedTime", start, end)) / 1e3

    # Memory.

    def allocate(self, num_bytes: int) -> int:
        return int(self._call("cuMemAlloc", num_bytes))

    def free(self, address: int) -> None:
        """Waits for the device to become idle."""
        self._call("cuMemFree", address)

    def allocate_host(self, num_bytes: int) -> int:
        """Pinned memory that kernels can read at the same address."""
        return int(self._call("cuMemHostAlloc", num_bytes, _HOST_PORTABLE_MAPPED))

    def free_host(self, address: int) -> None:
        self._call("cuMemFreeHost", address)

    def register_host(self, address: int, num_bytes: int) -> None:
        """Pin memory for all contexts. The driver holds a lock meanwhile, so other CUDA calls of the process wait."""
        self._call("cuMemHostRegister", address, num_bytes, _HOST_PORTABLE)

    def unregister_host(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)

    def write(self, address: int, values: npt.NDArray[Any]) -> None:
        """Copy an array to device memory, and wait for it."""
        self._call("cuMemcpyHtoD", address, values.ctypes.data, values.nbytes)

    def copy(
        self, target: Int64Array, source: Int64Array, size: Int64Array, order: AccessOrder, stream: Handle
    ) -> None:
        """Copy `size[i]` bytes from `source[i]` to `target[i]` (host or device addresses), in no particular order.

        "stream": sources are read in stream order. "any": they may be read before earlier work on the stream. After
        an error some copies may be under way: synchronise before reusing their memory.
        """
        if len(size) == 1:  # cheaper for a single copy
            self._call("cuMemcpyAsync", int(target[0]), int(source[0]), int(size[0]), stream)
            return
        arrays = (target.ctypes.data, source.ctypes.data, size.ctypes.data)
        status = self._copy_batch(*arrays, len(size), *_ATTRIBUTES[order], 1, _FAILED_INDEX, int(stream))
        if status != _SUCCESS:
            self._check("cuMemcpyBatchAsync", self._cu.CUresult(status))

    # Kernels.

    def compile(self, source: str, capability: tuple[int, int]) -> bytes:
        """Machine code of a CUDA C++ source. Raises `DriverError` with the compiler's log."""
        try:
            program = self._nvrtc_call("nvrtcCreateProgram", source.encode(), b"kvstow.cu", 0, [], [])
        except RuntimeError as error:  # cuda-bindings loads the library at its first call
            raise DriverUnavailableError(f"the CUDA device needs NVRTC, CUDA's run-time compiler: {error}") from error
        try:
            architecture = f"--gpu-architecture=sm_{capability[0]}{capability[1]}".encode()
            (status,) = self._nvrtc.nvrtcCompileProgram(program, 1, [architecture])
            if int(status) != _SUCCESS:
                raise self._compile_error(program, status)
            code: bytes = b" " * self._nvrtc_call("nvrtcGetCUBINSize", program)
            self._nvrtc_call("nvrtcGetCUBIN", program, code)
        finally:
            self._nvrtc_call("nvrtcDestroyProgram", program)
        return code

    def load_module(self, code: bytes) -> Handle:
        return self._call("cuModuleLoadData", code)

    def unload_module(self, module: Handle) -> None:
        self._call("cuModuleUnload", module)

    def get_function(self, module: Handle, name: str) -> Handle:
        return self._call("cuModuleGetFunction", module, name.encode())

    def launch(self, function: Handle, grid: tuple[int, int], threads: int, stream: Handle, arguments: int) -> None:
        """`arguments`: address of an array of pointers to the kernel's arguments."""
        self._call("cuLaunchKernel", function, *grid, 1, threads, 1, 1, 0, stream, arguments, 0)

    # The checked call.

    def _call(self, name: str, *arguments: Any) -> Any:
        status, *values = getattr(self._cu, name)(*arguments)
        if status != _SUCCESS:
            self._check(name, status)
        return values[0] if len(values) == 1 else values

    def _is_done(self, query: str, handle: Handle) -> bool:
        (status,) = getattr(self._cu, query)(handle)
        if int(status) == _NOT_READY:
            return False
        self._check(query, status)
        return True

    def _check(self, call: str, status: Any) -> None:
        if int(status) == _SUCCESS:
            return
        name, text = (self._describe(function, status) for function in ("cuGetErrorName", "cuGetErrorString"))
        raise DriverError(call, int(status), name or f"error {int(status)}", text or "no text")

    def _describe(self, function: str, status: Any) -> str:
        unknown, text = getattr(self._cu, function)(status)
        return "" if int(unknown) != _SUCCESS or text is None else text.decode()

    def _nvrtc_call(self, name: str, *arguments: Any) -> Any:
        status, *values = getattr(self._nvrtc, name)(*arguments)
        if int(status) != _SUCCESS:
            raise DriverError(name, int(status), str(status), "NVRTC gives no text")
        return values[0] if values else None

    def _compile_error(self, program: Handle, status: Any) -> DriverError:
        log = b" " * self._nvrtc_call("nvrtcGetProgramLogSize", program)
        self._nvrtc_call("nvrtcGetProgramLog", program, log)
        return DriverError("nvrtcCompileProgram", int(status), str(status), log.decode(errors="replace").strip(" \0\n"))

    # Initialisation.

    def _start(self) -> int:
        """Initialise the driver. Returns its version, such as 13000 for CUDA 13.0."""
        try:
            self._call("cuInit", 0)
            version = int(self._call("cuDriverGetVersion"))
        except RuntimeError as error:  # cuda-bindings found no libcuda.so
            raise DriverUnavailableError(f"no CUDA driver on this machine: {error}") from error
        except DriverError as error:
            raise DriverUnavailableError(f"the CUDA driver does not start: {error}") from error
        if version < _OLDEST:
            raise DriverUnavailableError(
                f"the CUDA driver is too old: it supports CUDA {version // 1000}.{version % 1000 // 10}; "
                "needed: 12.8 or newer"
            )
        return version

    def _find_batch_copy(self) -> Any:
        """cuMemcpyBatchAsync with the signature of CUDA 12.8, which CUDA 13 still offers. It is called through ctypes,
        because cuda-bindings would convert lists item by item."""
        address, *_ = self._call("cuGetProcAddress", b"cuMemcpyBatchAsync", _OLDEST, 0)
        if not address:  # a call through it would end the process
            raise DriverUnavailableError("the CUDA driver has no cuMemcpyBatchAsync; needed: 12.8 or newer")
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        arguments = (pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)
        return ctypes.CFUNCTYPE(ctypes.c_uint, *arguments)(int(address))


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_uint), ("id", ctypes.c_int)]


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes; without hints about locations."""

    _fields_ = [("order", ctypes.c_uint), ("source", _Location), ("target", _Location), ("flags", ctypes.c_uint)]


def _attributes_for_all(order: int) -> tuple[Any, Any]:
    """One set of attributes, valid from copy 0 on. Never written to, so all threads share it."""
    return ctypes.pointer(_CopyAttributes(order=order)), ctypes.pointer(ctypes.c_size_t(0))


_ATTRIBUTES = {"stream": _attributes_for_all(1), "any": _attributes_for_all(3)}
_FAILED_INDEX = ctypes.pointer(ctypes.c_size_t(0))  # the driver requires it; it is never read
