"""What the copies between host memory and the pool know of glibc."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.jax.rank import JaxRank

from kvstow.devices.jax import hostcopies

pytestmark = pytest.mark.jax

MakeRank = Callable[..., JaxRank]


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the loader of glibc would be, which says how it copies."""
    monkeypatch.setattr(hostcopies, "_LOADER", str(tmp_path / "loader"))
    return tmp_path / "loader"


@pytest.mark.parametrize(
    ("answer", "cached", "logged"),
    [
        ("glibc.cpu.x86_non_temporal_threshold: 0x12000000 (min: 0x4040, max: 0xfffffffffffffff)", 288 << 20, True),
        ("glibc.cpu.x86_non_temporal_threshold: 0x100000 (min: 0x4040, max: 0xfffffffffffffff)", 1 << 20, False),
        ("glibc.malloc.perturb: 0 (min: 0, max: 255)", None, False),
    ],
)
def test_a_device_says_how_its_copies_get_past_the_cache(
    make_rank: MakeRank,
    caplog: pytest.LogCaptureFixture,
    loader: Path,
    answer: str,
    cached: int | None,
    logged: bool,
) -> None:
    loader.write_text(f"#!/bin/sh\necho 'glibc.rtld.nns: 0x4 (min: 0x1, max: 0x10)'\necho '{answer}'\n")
    loader.chmod(0o755)
    assert hostcopies.cached_copy_bytes() == cached
    with caplog.at_level("INFO", "kvstow.jax"):
        make_rank(layers=[(64, 64, 128)] * 4, num_blocks=2, num_slots=2, host_memory="pinned")
        assert ("GLIBC_TUNABLES=glibc.cpu.x86_non_temporal_threshold=1048576" in caplog.text) == logged
        caplog.clear()
        make_rank(host_memory="pinned")  # small blocks
        make_rank(layers=[(64, 64, 128)] * 4, num_blocks=2, num_slots=2, host_memory="plain")
    assert "GLIBC" not in caplog.text


def test_the_tunable_of_glibc_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    if hostcopies.cached_copy_bytes() is None:
        pytest.skip("not glibc on x86-64")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.cpu.x86_non_temporal_threshold=1048576")
    assert hostcopies.cached_copy_bytes() == 1 << 20


def test_a_machine_without_that_loader_is_not_asked(loader: Path) -> None:
    assert not loader.exists()
    assert hostcopies.cached_copy_bytes() is None
