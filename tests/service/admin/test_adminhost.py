from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstow.memory.limits import RESERVE_BYTES, HugePageLimits, MemoryLimits
from kvstow_service.admin.adminhost import AdminOptions, make_api_host, measure_memory


@pytest.mark.parametrize(
    ("content", "word"),
    [("always [madvise] never\n", "madvise"), ("always madvise [never]\n", "never"), ("nonsense", ""), (None, "")],
)
def test_the_kernels_huge_page_setting_is_read(tmp_path: Path, content: str | None, word: str) -> None:
    path = tmp_path / "enabled"
    if content is not None:
        path.write_text(content)
    assert measure_memory(huge_pages=path).huge_pages == word


def test_the_lowest_limit_is_reported(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable: 1024 kB\n")
    facts = measure_memory(MemoryLimits(meminfo=tmp_path / "meminfo", own_cgroups=tmp_path / "none"))
    assert (facts.headroom_bytes, facts.reserve_bytes) == (1 << 20, RESERVE_BYTES)
    assert "1 MiB" in facts.limit


def test_an_unreadable_limit_is_reported_as_none(tmp_path: Path) -> None:
    facts = measure_memory(MemoryLimits(meminfo=tmp_path / "none", own_cgroups=tmp_path / "none"))
    assert (facts.headroom_bytes, facts.limit) == (None, "")


def test_reserved_huge_pages_have_limits_of_their_own(tmp_path: Path) -> None:
    for name, pages in {"free_hugepages": 3, "resv_hugepages": 0}.items():
        (tmp_path / name).write_text(str(pages))
    facts = measure_memory(HugePageLimits(own_cgroups=tmp_path / "none", pages=tmp_path))
    assert (facts.headroom_bytes, facts.reserve_bytes, facts.huge_pages) == (6 << 20, 0, "reserved")


@pytest.mark.parametrize("settings", [{"huge_pages": "reserved"}, {"huge_pages": "advised"}, {}])
def test_the_measured_limits_follow_the_huge_pages_setting(settings: dict[str, str]) -> None:
    parts: Any = SimpleNamespace(addresses=(), host=None, check=None, is_node=False)
    host = make_api_host(parts, parts, parts, AdminOptions(), mode="node", settings=settings, agent_token="t")
    assert host.host_memory is not None
    assert (host.host_memory().huge_pages == "reserved") == (settings.get("huge_pages") == "reserved")
