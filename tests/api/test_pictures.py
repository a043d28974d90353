from __future__ import annotations

import socket
from pathlib import Path

import pytest
from docs.pictures import draw_fleet, draw_service
from PIL import Image

pytestmark = [pytest.mark.browser, pytest.mark.process]


def test_the_pictures_of_the_readme_can_be_drawn(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    draw_service(tmp_path, seconds=2.0, port=port)
    for name in ("status.png", "status-dark.png"):
        with Image.open(tmp_path / name) as picture:
            assert picture.width == 1440
            assert picture.height > 800
    assert "kvstow top" in (tmp_path / "top.svg").read_text().replace("&#160;", " ")


def test_the_pictures_of_a_large_node_show_its_trouble(tmp_path: Path) -> None:
    draw_fleet(tmp_path, seconds=10.0)
    for name, width in (("fleet.png", 1440), ("fleet-dark.png", 1440), ("fleet-narrow.png", 390)):
        with Image.open(tmp_path / name) as picture:
            assert picture.width == width
    top = (tmp_path / "fleet-top.txt").read_text()
    assert "has been silent" in top
    assert "stuck" in top
    assert "is lost" in top
