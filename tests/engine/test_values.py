"""The values that all parts share: sizes, keys, layouts, settings, messages, errors."""

from __future__ import annotations

import pickle

import pytest
from tests.doubles.rank import ready_report

from kvstow.bytesize import format_size, parse_size
from kvstow.config import EngineConfig, PoolConfig
from kvstow.errors import ConfigError, InvalidRequestError, KvstowError, PinError
from kvstow.keys import chain_keys, format_key, make_key, parse_key
from kvstow.layout import KVLayout, Region

REPORT = ready_report(4096, 8)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        (4096, 4096),
        ("8GiB", 8 << 30),
        (" 2 mib ", 2 << 20),
        ("1.5KiB", 1536),
        ("60GB", 60 * 10**9),
        ("64Gi", 64 << 30),
        ("4G", 4 * 10**9),
        ("512Mi", 512 << 20),
        ("1.5Ti", 3 << 39),
        ("2k", 2000),
    ],
)
def test_sizes_are_parsed(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "8 GiB 2", "1e3", "0.3B", "8XB", "9" * 5000, f"{'9' * 400}.5GiB", -1, True]
)
def test_an_invalid_size_is_refused_by_name(text: str | int) -> None:
    with pytest.raises(ConfigError, match=r"pool_size is .*; allowed: "):
        parse_size(text, "pool_size")


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (8 << 30, "8 GiB"), (3 << 40, "3 TiB")])
def test_sizes_are_formatted(size: int, text: str) -> None:
    assert format_size(size) == text


def test_keys_chain() -> None:
    first, second = chain_keys([b"one", b"two"])
    assert list(chain_keys([b"one"])) == [first]
    assert list(chain_keys([b"eno", b"two"]))[1] != second, "a key covers all that comes before it"
    assert next(chain_keys([b"one"], salt=b"s")) != first
    assert next(chain_keys([b"one"], group=1)) == make_key(1, first[2:])


def test_keys_are_written_as_hex() -> None:
    assert parse_key(format_key(b"\x00\xff")) == b"\x00\xff"
    for text in ("", "zz", "abc"):
        with pytest.raises(InvalidRequestError, match="hex"):
            parse_key(text)


def test_a_slot_holds_a_blocks_pages_back_to_back() -> None:
    layout = KVLayout((Region("a", 4, 16, 16), Region("b", 4, 8, 32), Region("c", 4, 24, 24)))
    assert (layout.num_blocks, layout.slot_bytes, layout.offsets) == (4, 48, (0, 16, 24))


@pytest.mark.parametrize(("num_blocks", "page", "stride"), [(0, 8, 8), (1, 0, 8), (2, 8, 7)])
def test_an_impossible_region_is_refused(num_blocks: int, page: int, stride: int) -> None:
    with pytest.raises(ConfigError, match="region x"):
        Region("x", num_blocks, page, stride)


def test_a_layout_needs_regions_of_the_same_length() -> None:
    with pytest.raises(ConfigError, match="one or more"):
        KVLayout(())
    with pytest.raises(ConfigError, match="the same number in every region"):
        KVLayout((Region("a", 4, 8, 8), Region("b", 5, 8, 8)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"slot_bytes": 0},
        {"capacity_slots": 0},
        {"num_ranks": True},
        {"policy": "fifo"},
        {"transfer_timeout": 0.0},
        {"report_timeout": float("nan")},
        {"event_buffer": 1.5},
        {"rank_slot_bytes": (64, 32)},
        {"rank_slot_bytes": (0,)},
        {"slot_bytes": 65, "rank_slot_bytes": (64,)},
    ],
)
def test_an_engine_config_is_checked(wrong: dict[str, object]) -> None:
    key = next(iter(wrong))
    with pytest.raises(ConfigError, match=f"{key} is .*; allowed: "):
        EngineConfig(**{"slot_bytes": 64, "capacity_slots": 4, **wrong})  # type: ignore[arg-type]


def test_ranks_may_have_slots_of_different_size() -> None:
    config = EngineConfig(slot_bytes=64, capacity_slots=4, num_ranks=3, rank_slot_bytes=(64, 32, 64))
    assert [config.slot_bytes_of(rank) for rank in range(3)] == [64, 32, 64]
    assert EngineConfig(slot_bytes=64, capacity_slots=4, num_ranks=3).slot_bytes_of(2) == 64


@pytest.mark.parametrize(
    "wrong",
    [
        {"pool_bytes": 63},
        {"max_bytes": 64},
        {"pause": -1.0},
        {"pause": float("inf")},
        {"chunk_bytes": 0},
        {"huge_pages": "never"},
    ],
)
def test_a_pool_config_is_checked(wrong: dict[str, object]) -> None:
    (key,) = wrong
    with pytest.raises(ConfigError, match=f"{key} is .*; allowed: "):
        PoolConfig(**{"slot_bytes": 64, "pool_bytes": 256, **wrong})  # type: ignore[arg-type]


def test_a_pool_has_whole_slots_and_never_more_than_configured() -> None:
    config = PoolConfig(slot_bytes=100, pool_bytes=1099, max_bytes=2050)
    assert (config.capacity_slots, config.max_slots) == (10, 20)
    assert PoolConfig(slot_bytes=100, pool_bytes=1099).max_slots == 10


@pytest.mark.parametrize("error", [ConfigError("key", 1, "2"), PinError("memlock", "refused"), KvstowError("x")])
def test_errors_cross_processes(error: KvstowError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
