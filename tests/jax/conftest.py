from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

# Where there is no JAX, nothing here can even be imported.
collect_ignore_glob = [] if find_spec("jax") else ["*.py"]

# Before JAX starts. `make test-jax` runs everything with one device, too.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

# Most tests compile the same programs.
_cache = tempfile.TemporaryDirectory(prefix="kvstow-jax-", ignore_cleanup_errors=True)
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _cache.name)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")

if TYPE_CHECKING:
    from tests.jax.rank import JaxRank


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """Every thread that a test has started must end with it."""
    before = set(threading.enumerate())
    yield
    left = [one.name for one in threading.enumerate() if one not in before and one.name.startswith("kvstow")]
    assert left == []


@pytest.fixture
def make_rank() -> Iterator[Callable[..., JaxRank]]:
    from tests.jax.rank import JaxRank

    ranks: list[JaxRank] = []

    def make(**settings: Any) -> JaxRank:
        ranks.append(JaxRank(**settings))
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.close()
