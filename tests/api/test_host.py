from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstow.control.engine import OffloadEngine
from kvstow.errors import ConfigError
from kvstow_api.app import create_app
from kvstow_api.directory import EmbeddedDirectory
from kvstow_api.host import ApiHost


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"readiness_require": ("pined",)}, r"readiness.require is \['pined'\]; allowed: any of pool, pinned"),
        ({"agent_token": ""}, "agent_token"),
        ({"startup_grace": -1.0}, "startup_grace"),
        ({"startup_grace": float("nan")}, "startup_grace"),
    ],
)
def test_a_bad_context_is_refused_naming_the_setting(
    engine: OffloadEngine, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        ApiHost(directory=EmbeddedDirectory(engine, 16), version="1", mode="test", **changes)


def test_a_context_does_not_show_its_agent_token(engine: OffloadEngine) -> None:
    context = ApiHost(directory=EmbeddedDirectory(engine, 16), version="1", mode="test", agent_token="s3cret")
    assert "s3cret" not in repr(context)


def test_an_application_does_not_start_without_its_token(engine: OffloadEngine, tmp_path: Path) -> None:
    context = ApiHost(directory=EmbeddedDirectory(engine, 16), version="1", mode="test", token_file=tmp_path / "absent")
    with pytest.raises(ConfigError, match="token_file"):
        create_app(context)
