from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstow.devices.cuda import DriverError, DriverUnavailableError
from kvstow.devices.cuda.context import primary_context
from kvstow.devices.cuda.driver import Driver, load_driver
from kvstow.errors import KvstowError

New = Callable[..., Any]


def test_an_error_carries_the_drivers_name_and_text_and_can_be_pickled(cuda: Any) -> None:
    cuda.failures["cuMemAlloc"] = (0, 2)
    with pytest.raises(DriverError, match="cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY") as caught:
        primary_context(0).driver.allocate(64)
    error = caught.value
    assert isinstance(error, KvstowError)
    assert (error.call, error.name, error.text) == ("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY", "the driver's text")
    assert error.is_out_of_memory
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.status) == (DriverError, str(error), 2)


def test_an_error_without_a_name_is_shown_by_its_number(cuda: Any) -> None:
    cuda.failures["cuMemAlloc"] = (0, 12345)
    with pytest.raises(DriverError, match="error 12345"):
        primary_context(0).driver.allocate(64)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    load_driver.cache_clear()
    with pytest.raises(DriverUnavailableError, match=r"cuda-bindings, 12\.8 or newer"):
        load_driver()


def test_a_missing_driver_is_named(new_cuda: New, new_nvrtc: New, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = new_cuda()

    def not_found(flags: int) -> None:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    monkeypatch.setattr(cuda, "cuInit", not_found)
    with pytest.raises(
        DriverUnavailableError, match=r"no CUDA driver on this machine: Failed to dlopen libcuda\.so\.1"
    ):
        Driver(cuda, new_nvrtc())


def test_a_driver_without_a_device_is_an_error(new_cuda: New, new_nvrtc: New) -> None:
    cuda = new_cuda()
    cuda.failures["cuInit"] = (0, 100)
    with pytest.raises(DriverUnavailableError, match="CUDA_ERROR_NO_DEVICE"):
        Driver(cuda, new_nvrtc())


def test_the_error_for_an_old_driver_names_the_version_needed(new_cuda: New, new_nvrtc: New) -> None:
    with pytest.raises(DriverUnavailableError, match=r"supports CUDA 12\.4; needed: 12\.8 or newer"):
        Driver(new_cuda(12040), new_nvrtc())


def test_a_driver_that_lacks_the_batched_copy_is_an_error(
    new_cuda: New, new_nvrtc: New, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = new_cuda()
    monkeypatch.setattr(cuda, "cuGetProcAddress", lambda name, version, flags: (0, 0, 1))
    with pytest.raises(DriverUnavailableError, match="no cuMemcpyBatchAsync; needed: 12"):
        Driver(cuda, new_nvrtc())


@pytest.mark.parametrize("version", [12080, 13000])
def test_many_copies_are_one_call(version: int, new_cuda: New, new_nvrtc: New) -> None:
    cuda = new_cuda(version)
    driver = Driver(cuda, new_nvrtc())
    _, stream = cuda.cuStreamCreateWithPriority(0, 0)
    source, target = np.arange(30, dtype=np.uint8), np.zeros(30, np.uint8)
    starts = np.array([0, 10, 20])
    driver.copy(target.ctypes.data + starts, source.ctypes.data + starts, np.array([10, 5, 10]), "stream", stream)
    assert target.sum() == 0
    cuda.run()
    assert target.tolist() == [*range(15), *[0] * 5, *range(20, 30)]
    assert (cuda.calls["cuMemcpyBatchAsync"], "cuMemcpyAsync" in cuda.calls) == (1, False)


def test_a_refused_batch_of_copies_is_an_error(cuda: Any) -> None:
    cuda.failures["cuMemcpyBatchAsync"] = (0, 1)
    _, stream = cuda.cuStreamCreateWithPriority(0, 0)
    two = np.zeros(2, np.int64)
    with pytest.raises(DriverError, match="cuMemcpyBatchAsync failed: CUDA_ERROR_INVALID_VALUE"):
        primary_context(0).driver.copy(two, two, two, "any", stream)


def test_the_error_for_a_kernel_that_does_not_compile_has_the_compilers_log(new_cuda: New, new_nvrtc: New) -> None:
    nvrtc = new_nvrtc(b"kvstow.cu(7): error: what is this?\n\0")
    with pytest.raises(DriverError, match=r"kvstow\.cu\(7\): error: what is this\?$"):
        Driver(new_cuda(), nvrtc).compile("what is this?", (9, 0))
    assert nvrtc.programs == 0


def test_a_missing_compiler_is_named(new_cuda: New, new_nvrtc: New, monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc = new_nvrtc()

    def not_found(*arguments: Any) -> None:
        raise RuntimeError("libnvrtc.so.13 not found")

    monkeypatch.setattr(nvrtc, "nvrtcCreateProgram", not_found)
    with pytest.raises(DriverUnavailableError, match=r"NVRTC.*libnvrtc\.so\.13"):
        Driver(new_cuda(), nvrtc).compile("", (9, 0))


def test_a_context_is_current_and_captures_are_allowed_only_inside(cuda: Any) -> None:
    context = primary_context(0)
    with context.current(), context.current():
        assert (len(cuda.contexts), cuda.capture_mode) == (2, 2)
    assert (cuda.contexts, cuda.capture_mode) == ([], 0)
    with pytest.raises(ZeroDivisionError), context.current():
        _ = 1 / 0
    assert (cuda.contexts, cuda.capture_mode) == ([], 0)


@pytest.mark.parametrize("call", ["cuThreadExchangeStreamCaptureMode", "cuCtxPopCurrent"])
def test_leaving_a_context_never_hides_the_result_of_the_body(call: str, cuda: Any) -> None:
    """A caller that has registered memory in it would take the error for a refusal, and free the memory."""
    context = primary_context(0)
    with context.current():
        cuda.failures[call] = (cuda.calls.get(call, 0), 700)


def test_a_context_that_cannot_be_entered_is_left(cuda: Any) -> None:
    context = primary_context(0)
    call = "cuThreadExchangeStreamCaptureMode"
    cuda.failures[call] = (cuda.calls.get(call, 0), 700)
    with pytest.raises(DriverError, match=call), context.current():
        raise AssertionError("its body must not run")
    assert cuda.contexts == []
