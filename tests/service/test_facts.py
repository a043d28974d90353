from __future__ import annotations

from pathlib import Path

import pytest

from kvstow.memory.limits import RESERVE_BYTES, MemoryLimits
from kvstow_service.facts import measure_host


@pytest.mark.parametrize(
    ("content", "word"),
    [("always [madvise] never\n", "madvise"), ("always madvise [never]\n", "never"), ("nonsense", ""), (None, "")],
)
def test_the_kernels_word_on_huge_pages_is_read(tmp_path: Path, content: str | None, word: str) -> None:
    path = tmp_path / "enabled"
    if content is not None:
        path.write_text(content)
    assert measure_host(huge_pages=path).huge_pages == word


def test_the_tightest_limit_is_told(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable: 1024 kB\n")
    facts = measure_host(MemoryLimits(meminfo=tmp_path / "meminfo", own_cgroups=tmp_path / "none"))
    assert (facts.headroom_bytes, facts.reserve_bytes) == (1 << 20, RESERVE_BYTES)
    assert "1 MiB" in facts.limit


def test_where_no_limit_can_be_read_none_is_told(tmp_path: Path) -> None:
    facts = measure_host(MemoryLimits(meminfo=tmp_path / "none", own_cgroups=tmp_path / "none"))
    assert (facts.headroom_bytes, facts.limit) == (None, "")
