"""`kv_connector_extra_config`: what a user may set, checked before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvstow.bytesize import parse_size
from kvstow.config import COPY_STRATEGIES, HUGE_PAGES, POLICIES, CopyStrategy, EngineConfig, HugePages, PoolConfig
from kvstow.errors import ConfigError
from kvstow_api.checks import INFORMATIONAL_CHECKS
from kvstow_api.hostnames import parse_host_names
from kvstow_service.duration import parse_duration

DEFAULT_BYTES = 8 << 30
"""Of SimpleCPUOffloadConnector, whose keys keep their meaning."""

_ALIASES = {"async_init": "async_register_cache"}
_OF_VLLM = frozenset({"enable_cross_layers_blocks"})
"""Keys that vLLM itself reads from the same mapping."""


def refusal(key: str, value: object, allowed: str) -> ConfigError:
    """The error for a key of `kv_connector_extra_config`."""
    return ConfigError(f"kv_connector_extra_config: {key}", value, allowed)


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """The settings of one engine. Sizes in bytes, times in seconds.

    `cpu_bytes_to_use` is shared by all ranks of an engine (a data-parallel engine is one of its own), down to whole
    slots; `cpu_bytes_to_use_per_rank` takes its place. `max_bytes` bounds, over all ranks, what a resize may ask for;
    by default the memory of the machine does. `lazy_offload` stores blocks when the GPU is about to evict them.
    Without `async_register_cache` vLLM's start waits until the pool is pinned. `huge_pages`: as in `PoolConfig`.
    """

    cpu_bytes_to_use: int = DEFAULT_BYTES
    cpu_bytes_to_use_per_rank: int | None = None
    max_bytes: int | None = None
    lazy_offload: bool = False
    async_register_cache: bool = True
    policy: str = "lru"
    transfer_timeout: float = 30.0
    copy_strategy: CopyStrategy = "auto"
    lock: bool = True
    huge_pages: HugePages = "advised"
    pin_chunk: int | None = None
    pin_pause: float | None = None
    pin_latency_target: float | None = None
    admin_host: str = "127.0.0.1"
    admin_port: int = 9595
    admin_uds: Path | None = None
    token_file: Path | None = None
    viewer_token_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    readiness_require: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()

    @classmethod
    def parse(cls, extra: Mapping[str, Any] | None) -> ConnectorOptions:
        """Raises `ConfigError` for an unknown key, a value out of range, or two that contradict each other."""
        given: dict[str, Any] = {}
        for key, value in (extra or {}).items():
            if key in _OF_VLLM:
                continue
            name = _ALIASES.get(key, key)
            if name not in _PARSERS:
                known = ", ".join(sorted((*_PARSERS, *_ALIASES)))
                raise refusal(key, value, f"no such key; there are {known}")
            if name in given:
                raise refusal(key, value, f"only one of {key} and {name}")
            if value is not None:
                given[name] = _PARSERS[name](f"kv_connector_extra_config: {key}", value)
        options = cls(**given)
        if options.max_bytes is not None and options.max_bytes < options.bytes_of_rank(1):
            least = f"none, or at least the pool's size, {options.bytes_of_rank(1)}"
            raise refusal("max_bytes", options.max_bytes, least)
        if options.pin_latency_target is not None and (options.pin_chunk, options.pin_pause) != (None, None):
            fixed = "none beside pin_chunk or pin_pause, which fix the pace"
            raise refusal("pin_latency_target", options.pin_latency_target, fixed)
        return options

    # All ranks have the same number of slots, so they share bytes in proportion to the size of their slots.

    def bytes_of_rank(self, num_ranks: int) -> int:
        """What a rank may pin before it knows the size of the others' slots."""
        return self.cpu_bytes_to_use_per_rank or self.cpu_bytes_to_use // num_ranks

    def capacity_slots(self, slot_bytes: Sequence[int]) -> int:
        """Slots that fit on every rank, whose slots have these sizes. Raises `ConfigError` if not even one does."""
        if self.cpu_bytes_to_use_per_rank is not None:
            key, value, least = "cpu_bytes_to_use_per_rank", self.cpu_bytes_to_use_per_rank, max(slot_bytes)
        else:
            key, value, least = "cpu_bytes_to_use", self.cpu_bytes_to_use, sum(slot_bytes)
        if value < least:
            raise refusal(key, value, f"at least one block, {least} bytes")
        return value // least

    def max_slots(self, slot_bytes: Sequence[int], fitting: int) -> int:
        """Slots that every rank may grow to; `fitting`: how many the ranks' machines have room for. Raises
        `ConfigError` where the pool's size exceeds `max_bytes`."""
        capacity = self.capacity_slots(slot_bytes)
        if self.max_bytes is None:
            return max(capacity, fitting)
        if (most := self.max_bytes // sum(slot_bytes)) < capacity:
            least = f"none, or at least the size of all pools, {capacity * sum(slot_bytes)}"
            raise refusal("max_bytes", self.max_bytes, least)
        return most

    def reserved_bytes_of_rank(self, node_bytes: int) -> int:
        """Address space for a rank's pool: for as much as it could have where the others' slots are small. `node_bytes`
        is what its machine could give to pools."""
        return max(self.bytes_of_rank(1), self.max_bytes or node_bytes)

    def pool_config(self, slot_bytes: int, pool_bytes: int, max_bytes: int) -> PoolConfig:
        return PoolConfig(
            slot_bytes=slot_bytes,
            pool_bytes=pool_bytes,
            max_bytes=max_bytes,
            chunk_bytes=self.pin_chunk,
            pause=self.pin_pause,
            latency_target=self.pin_latency_target,
            lock=self.lock,
            huge_pages=self.huge_pages,
        )

    def engine_config(self, rank_slot_bytes: Sequence[int], block_tokens: int) -> EngineConfig:
        return EngineConfig(
            slot_bytes=max(rank_slot_bytes),
            rank_slot_bytes=tuple(rank_slot_bytes),
            capacity_slots=self.capacity_slots(rank_slot_bytes),
            num_ranks=len(rank_slot_bytes),
            policy=self.policy,
            block_tokens=block_tokens,
            transfer_timeout=self.transfer_timeout,
        )

    def public(self) -> dict[str, Any]:
        """For every reader of the admin API: paths of this machine stay out."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if not isinstance(value, Path)}


def _size(key: str, value: Any) -> int:
    if not isinstance(value, int | str) or (size := parse_size(value, key)) < 1:
        raise ConfigError(key, value, "a size of 1 byte or more, such as 60000000000 or 60GB")
    return size


def _flag(key: str, value: Any) -> bool:
    if type(value) is not bool:
        raise ConfigError(key, value, "true or false")
    return value


def _positive_seconds(key: str, value: Any) -> float:
    if not (seconds := parse_duration(value, key)):
        raise ConfigError(key, value, "more than 0 seconds")
    return seconds


def _choice(*allowed: str) -> Callable[[str, Any], str]:
    def parse(key: str, value: Any) -> str:
        if value not in allowed:
            raise ConfigError(key, value, " or ".join(allowed))
        return str(value)

    return parse


def _port(key: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < 65536:
        raise ConfigError(key, value, "a port, 0 (any free one) to 65535")
    return value


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(key, value, "a non-empty string")
    return value


def _path(key: str, value: Any) -> Path:
    return Path(_text(key, value))


def _checks(key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(each in INFORMATIONAL_CHECKS for each in value):
        raise ConfigError(key, value, f"a list of {' and '.join(INFORMATIONAL_CHECKS)}")
    return tuple(value)


_PARSERS: dict[str, Callable[[str, Any], Any]] = {
    "cpu_bytes_to_use": _size,
    "cpu_bytes_to_use_per_rank": _size,
    "max_bytes": _size,
    "lazy_offload": _flag,
    "async_register_cache": _flag,
    "policy": _choice(*POLICIES),
    "transfer_timeout": _positive_seconds,
    "copy_strategy": _choice(*COPY_STRATEGIES),
    "lock": _flag,
    "huge_pages": _choice(*HUGE_PAGES),
    "pin_chunk": _size,
    "pin_pause": lambda key, value: parse_duration(value, key),
    "pin_latency_target": _positive_seconds,
    "admin_host": _text,
    "admin_port": _port,
    "admin_uds": _path,
    "token_file": _path,
    "viewer_token_file": _path,
    "tls_cert": _path,
    "tls_key": _path,
    "tls_client_ca": _path,
    "readiness_require": _checks,
    "allowed_hosts": parse_host_names,
}
