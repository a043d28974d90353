"""How much a store holds, as the options of its URL say it."""

from __future__ import annotations

from collections.abc import Mapping

from kvstow.bytesize import parse_size
from kvstow.errors import ConfigError

CAPACITY_OPTIONS = ("capacity", "nodes")
_MAX_NODES = 100_000


def capacity_share(options: Mapping[str, str]) -> int | None:
    """The share of one node, in bytes, of a store with `capacity` that so many `nodes` use; None without a capacity.
    Raises `ConfigError`."""
    nodes = whole_number("nodes", options.get("nodes", "1"), _MAX_NODES)
    if "capacity" not in options:
        if "nodes" in options:
            raise ConfigError("tier option nodes", options["nodes"], "together with capacity=SIZE")
        return None
    share = parse_size(options["capacity"], "tier option capacity") // nodes
    if share < 1:
        raise ConfigError("tier option capacity", options["capacity"], "more than 0 bytes for each node")
    return share


def whole_number(option: str, text: str, most: int) -> int:
    """Raises `ConfigError` unless the option of a URL is a number from 1 to `most`."""
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= most:
        raise ConfigError(f"tier option {option}", text, f"a whole number from 1 to {most}")
    return int(text)
