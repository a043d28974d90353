from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

# Where there is no tpu-inference, nothing here can even be imported.
collect_ignore_glob = [] if find_spec("tpu_inference") else ["*.py"]

if find_spec("tpu_inference"):
    from tests.tpu import nohardware

    nohardware.prepare()

if TYPE_CHECKING:
    from tests.tpu.engine import Engine


@pytest.fixture(autouse=True)
def no_thread_is_left() -> None:
    """The engine is the session's, and so are the threads that a test has it start."""


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One for all tests: a process has one KV connector."""
    from tests.tpu.engine import Engine

    engine = Engine(tmp_path_factory.mktemp("model"))
    yield engine
    engine.close()
