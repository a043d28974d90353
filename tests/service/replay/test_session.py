"""Replays over the real CPU device, and what happens when its pool cannot be had."""

from threading import Event

import pytest

from kvstow.config import EngineConfig
from kvstow.errors import InsufficientMemoryError, PinError
from kvstow.memory.pinning import MlockRegistrar
from kvstow_service.replay.driver import ReplayDriver, blocks_needed
from kvstow_service.replay.offload import EmbeddedOffload
from kvstow_service.replay.ranks import local_session
from kvstow_service.replay.trace import ReplayOptions, TraceRequest


@pytest.mark.parametrize(
    ("ranks", "slot_bytes", "concurrency"),
    [(1, 4096, 1), (3, 4096, 4), (1, 4099, 4), (3, 1, 1), (2, 65540, 4)],
)
def test_every_loaded_byte_is_right(
    conversations: list[TraceRequest], ranks: int, slot_bytes: int, concurrency: int
) -> None:
    config = EngineConfig(slot_bytes=slot_bytes, capacity_slots=300, num_ranks=ranks)
    kv_blocks = blocks_needed(conversations, concurrency)
    with local_session(config, kv_blocks=kv_blocks, stop=Event()) as session:
        options = ReplayOptions(concurrency=concurrency)
        driver = ReplayDriver(
            EmbeddedOffload(session.engine), session.workers, session.kv, conversations, options, kv_blocks=kv_blocks
        )
        result = driver.run(Event())
        assert driver.free_blocks == kv_blocks
        session.engine.check_integrity()
    assert (result.requests, result.mismatches, result.loaded.failed) == (len(conversations), 0, 0)
    assert result.verified_bytes == result.loaded.num_bytes == result.loaded.blocks * slot_bytes * ranks > 0
    assert result.evicted_blocks
    assert result.loaded.gbps > 0
    assert result.stored.gbps > 0


def test_the_session_begins_with_every_slot_usable() -> None:
    config = EngineConfig(slot_bytes=4096, capacity_slots=500)
    with local_session(config, kv_blocks=1, stop=Event()) as session:
        assert session.engine.readiness().usable_slots == 500


def test_a_stop_ends_the_wait_for_pinning() -> None:
    stop = Event()
    stop.set()
    with local_session(EngineConfig(slot_bytes=4096, capacity_slots=500), kv_blocks=1, stop=stop) as session:
        assert session.engine.readiness().usable_slots == 0


def test_a_rank_that_cannot_pin_ends_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: MlockRegistrar, address: int, num_bytes: int) -> None:
        raise PinError("memlock", "refused")

    monkeypatch.setattr(MlockRegistrar, "register", refuse)
    config = EngineConfig(slot_bytes=4096, capacity_slots=500)
    with (
        pytest.raises(PinError, match=r"rank 0: .*refused"),
        local_session(config, kv_blocks=1, stop=Event()),
    ):
        pytest.fail("the session began without a pool")


def test_a_pool_larger_than_the_machine_is_refused() -> None:
    config = EngineConfig(slot_bytes=1 << 30, capacity_slots=1 << 20)
    with pytest.raises(InsufficientMemoryError), local_session(config, kv_blocks=1, stop=Event()):
        pytest.fail("the session began without a pool")
