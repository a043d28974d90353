from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvstow.devices.cuda.context import CudaRegistrar
from kvstow.devices.cuda.driver import DriverError
from kvstow.errors import PinError


class FakeDriver:
    """Registers memory, unless `status` is an error; only while its context is current."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.status = 0
        self.is_current = False

    @contextmanager
    def current(self) -> Iterator[None]:
        self.is_current = True
        yield
        self.is_current = False

    def register_host(self, address: int, num_bytes: int) -> None:
        self._check("cuMemHostRegister")
        self.registered[address] = num_bytes

    def unregister_host(self, address: int) -> None:
        self._check("cuMemHostUnregister")
        del self.registered[address]

    def host_numa_node(self, ordinal: int) -> int | None:
        return {0: 1}.get(ordinal)

    def _check(self, call: str) -> None:
        assert self.is_current
        if self.status:
            name = {2: "CUDA_ERROR_OUT_OF_MEMORY", 1: "CUDA_ERROR_INVALID_VALUE"}[self.status]
            raise DriverError(call, self.status, name, "as the driver says it")


class FakeContext:
    def __init__(self, ordinal: int = 0) -> None:
        self.ordinal, self.driver = ordinal, FakeDriver()
        self.current = self.driver.current


@pytest.fixture
def context() -> FakeContext:
    return FakeContext()


@pytest.fixture
def registrar(context: Any) -> CudaRegistrar:
    return CudaRegistrar(context=context)


def test_ranges_are_registered_and_counted(registrar: CudaRegistrar, context: FakeContext) -> None:
    for address in (4096, 12288, 8192):
        registrar.register(address, 4096)
    assert registrar.starts().tolist() == [4096, 8192, 12288]
    assert (registrar.mode, registrar.locked_bytes) == ("cuda", 3 * 4096)
    registrar.unregister(8192, 4096)
    assert registrar.starts().tolist() == [4096, 12288]
    assert sum(context.driver.registered.values()) == registrar.locked_bytes == 2 * 4096


@pytest.mark.parametrize(
    ("status", "reason", "name"),
    [(2, "out_of_memory", "CUDA_ERROR_OUT_OF_MEMORY"), (1, "driver", "CUDA_ERROR_INVALID_VALUE")],
)
def test_a_refusal_carries_the_drivers_name_and_registers_nothing(
    registrar: CudaRegistrar, context: FakeContext, status: int, reason: str, name: str
) -> None:
    context.driver.status = status
    with pytest.raises(PinError, match=rf"cuMemHostRegister failed: {name} \({status}\)") as caught:
        registrar.register(4096, 4096)
    assert caught.value.reason == reason
    assert (registrar.locked_bytes, len(registrar.starts())) == (0, 0)


def test_a_range_that_stays_registered_still_counts(registrar: CudaRegistrar, context: FakeContext) -> None:
    registrar.register(4096, 4096)
    context.driver.status = 1
    with pytest.raises(PinError, match="cuMemHostUnregister") as caught:
        registrar.unregister(4096, 4096)
    assert caught.value.reason == "driver"
    assert (registrar.locked_bytes, registrar.starts().tolist()) == (4096, [4096])


@pytest.mark.parametrize("call", ["register", "unregister"])
def test_an_error_outside_the_drivers_call_keeps_records_and_driver_consistent(
    call: str, registrar: CudaRegistrar, context: FakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`register` that raises has registered nothing; `unregister` that raises has unregistered nothing."""
    registrar.register(4096, 4096)

    class NoMemory:
        def __getattr__(self, name: str) -> Any:
            raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("kvstow.devices.cuda.context.np", NoMemory())
        with pytest.raises(MemoryError):
            getattr(registrar, call)(Incomparable(4096) if call == "unregister" else 8192, 4096)
    assert registrar.starts().tolist() == list(context.driver.registered) == [4096]
    assert registrar.locked_bytes == 4096


def test_a_signal_right_after_the_drivers_call_leaves_nothing_registered(
    registrar: CudaRegistrar, context: FakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    register = context.driver.register_host

    def interrupted(address: int, num_bytes: int) -> None:
        register(address, num_bytes)
        raise SystemExit

    monkeypatch.setattr(context.driver, "register_host", interrupted)
    with pytest.raises(SystemExit):
        registrar.register(4096, 4096)
    assert (context.driver.registered, registrar.locked_bytes, registrar.starts().tolist()) == ({}, 0, [])


def test_an_unprepared_thread_makes_the_context_current_even_with_a_reused_number(
    registrar: CudaRegistrar, context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system reuses the number of a thread that has ended."""
    context.settle = lambda: None
    pinning = threading.Thread(target=registrar.prepare_thread)
    pinning.start()
    pinning.join(60)
    monkeypatch.setattr(threading, "get_ident", lambda: pinning.ident)
    registrar.register(4096, 4096)
    assert context.driver.registered == {4096: 4096}


class Incomparable(int):
    """An address with which numpy compares nothing itself."""

    __array_ufunc__ = None

    def __ne__(self, other: object) -> bool:
        raise MemoryError


def test_preparing_a_thread_can_be_retried(context: Any) -> None:
    errors = [DriverError("cuCtxPushCurrent", 1, "CUDA_ERROR_INVALID_VALUE", "as the driver says it")]

    def settle() -> None:
        if errors:
            raise errors.pop()

    context.settle = settle
    registrar = CudaRegistrar(context=context)
    with pytest.raises(PinError, match="cuCtxPushCurrent"):
        registrar.prepare_thread()
    registrar.prepare_thread()


def test_starts_that_were_read_do_not_change(registrar: CudaRegistrar) -> None:
    registrar.register(8192, 4096)
    before = registrar.starts()
    registrar.register(4096, 4096)
    assert before.tolist() == [8192]


def test_the_numa_node_is_that_of_the_gpu(registrar: CudaRegistrar) -> None:
    assert registrar.numa_node == 1
    elsewhere: Any = FakeContext(ordinal=1)
    assert CudaRegistrar(context=elsewhere).numa_node is None
