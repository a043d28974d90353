"""`kv_connector_extra_config`: the options that a user may set. They are checked before anything starts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Self, get_type_hints

from kvstow.attach.connection import socket_path
from kvstow.bytesize import format_size, parse_size
from kvstow.config import (
    COPY_STRATEGIES,
    HUGE_PAGES,
    CopyStrategy,
    EngineConfig,
    HugePages,
    PoolConfig,
    parse_policy,
)
from kvstow.errors import ConfigError, SettingError
from kvstow.memory.limits import MemoryLimits, limits_of
from kvstow_api.hostsettings import INFORMATIONAL_CHECKS, parse_host_names
from kvstow_service.connectors.engine_core.loadpolicy import LOAD_PATHS, LoadPath
from kvstow_service.duration import parse_duration

logger = logging.getLogger("kvstow.vllm")

DEFAULT_SHARE = 4
"""If no size is set, the pool's size is the memory of the machine or the container, divided by this."""
_DEFAULT_BYTES = 8 << 30
"""The pool's size in bytes if none is set and that memory cannot be read."""
_ALIASES = {"async_init": "async_register_cache"}
"""Keys of SimpleCPUOffloadConnector, which keep their meaning, by the option that they set."""
_OF_VLLM = frozenset({"enable_cross_layers_blocks"})
"""Keys that vLLM itself reads from the same mapping."""
_PREFIX = "kv_connector_extra_config: "

_OF_SERVICE = (
    "cpu_bytes_to_use_per_rank",
    "max_bytes",
    "policy",
    "curve",
    "transfer_timeout",
    "huge_pages",
    "admin_host",
    "admin_port",
    "token_file",
    "viewer_token_file",
    "tls_cert",
    "tls_key",
    "tls_client_ca",
    "readiness_require",
    "allowed_hosts",
)
"""Options that have no effect beside `attach`, because the node service decides on them."""


def refusal(key: str, value: object, allowed: str) -> ConfigError:
    """The error for a value of a key of `kv_connector_extra_config`."""
    return ConfigError(_PREFIX + key, value, allowed)


def misuse(key: str, value: object, sentence: str) -> SettingError:
    """The error for a key that is unknown or does not fit the others. `sentence` follows the key and the value."""
    return SettingError(_PREFIX + key, value, sentence)


def size(key: str, value: Any) -> int:
    if not isinstance(value, int | str) or (size := parse_size(value, key)) < 1:
        raise ConfigError(key, value, "a size of 1 byte or more, such as 60000000000 or 60GB")
    return size


def default_size(limits: MemoryLimits) -> int:
    """The pool's size if none is set. It depends on limits alone, not on what is in use, so all processes of an engine
    on a machine decide on the same size."""
    total = limits.total()
    return _DEFAULT_BYTES if total is None else max(1, total // DEFAULT_SHARE)


def say_size(options: ConnectorOptions, extra: Mapping[str, Any] | None) -> None:
    """Log the size of a pool for which no size is set."""
    if options.attach is None and not {"cpu_bytes_to_use", "cpu_bytes_to_use_per_rank"} & {*(extra or {})}:
        logger.info(
            "cpu_bytes_to_use is not set: the pool gets %s. The default is a quarter of the memory of this machine or "
            "container (%s if that is unknown), and at most max_bytes",
            format_size(options.cpu_bytes_to_use),
            format_size(_DEFAULT_BYTES),
        )


def _valid(accepts: Callable[[Any], bool], allowed: str) -> Callable[[str, Any], Any]:
    """Return a parser that returns the value as it is. It raises `ConfigError` unless `accepts` returns true for it."""

    def parse(key: str, value: Any) -> Any:
        if not accepts(value):
            raise ConfigError(key, value, allowed)
        return value

    return parse


def _choice(*allowed: str) -> Callable[[str, Any], Any]:
    return _valid(lambda value: value in allowed, " or ".join(allowed))


_flag = _valid(lambda value: type(value) is bool, "true or false")
_port = _valid(lambda value: type(value) is int and 0 <= value < 65536, "a port, 0 (any free one) to 65535")
_text = _valid(lambda value: isinstance(value, str) and value != "", "a non-empty string")


def _seconds(key: str, value: Any) -> float:
    return parse_duration(value, key)


def _positive_seconds(key: str, value: Any) -> float:
    if not (seconds := parse_duration(value, key)):
        raise ConfigError(key, value, "more than 0 seconds")
    return seconds


def _policy(key: str, value: Any) -> str:
    return parse_policy(value, key)


def _path(key: str, value: Any) -> Path:
    return Path(_text(key, value))


def _checks(key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(each in INFORMATIONAL_CHECKS for each in value):
        raise ConfigError(key, value, f"a list of {' and '.join(INFORMATIONAL_CHECKS)}")
    return tuple(value)


def _socket(key: str, value: Any) -> Path:
    try:
        return socket_path(_text(key, value))
    except ConfigError as error:
        raise error.renamed(key) from None


def _check_attach(given: Mapping[str, Any]) -> None:
    if "attach" not in given:
        if "weights_id" in given:
            raise misuse("weights_id", given["weights_id"], "needs attach: nobody else finds this engine's blocks")
        if given.get("attach_require_sharing"):
            raise misuse("attach_require_sharing", True, "needs attach, the socket of the node service")
        return
    for key in _OF_SERVICE:
        if key in given:
            raise misuse(
                key, given[key], "has no effect beside attach: the node service has the pool and its admin API"
            )
    if given.get("async_register_cache") is False:
        raise misuse("async_register_cache", False, "contradicts attach: vLLM's start never waits for the node service")


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """The settings of one engine, each with the function that parses it. Sizes are in bytes, times in seconds.
    `docs/vllm.md` says what each does.

    All ranks of an engine share `cpu_bytes_to_use`, rounded down to whole slots (a data-parallel engine counts as an
    engine of its own). If no size is given, `parse` sets a quarter of the machine's or the container's memory. With
    `attach`, the socket of the node service, `cpu_bytes_to_use` is the memory that the engine asks the service for. 0,
    the default then, asks for all of the service's memory.
    """

    cpu_bytes_to_use: Annotated[int, size] = _DEFAULT_BYTES
    cpu_bytes_to_use_per_rank: Annotated[int | None, size] = None
    max_bytes: Annotated[int | None, size] = None
    lazy_offload: Annotated[bool, _flag] = False
    async_register_cache: Annotated[bool, _flag] = True
    policy: Annotated[str, _policy] = "auto"
    curve: Annotated[bool, _flag] = True
    transfer_timeout: Annotated[float, _positive_seconds] = 30.0
    copy_strategy: Annotated[CopyStrategy, _choice(*COPY_STRATEGIES)] = "auto"
    load_path: Annotated[LoadPath, _choice(*LOAD_PATHS)] = "auto"
    load_step_budget: Annotated[float, _seconds] = 0.01
    lock: Annotated[bool, _flag] = True
    huge_pages: Annotated[HugePages, _choice(*HUGE_PAGES)] = "advised"
    pin_chunk: Annotated[int | None, size] = None
    pin_pause: Annotated[float | None, _seconds] = None
    pin_latency_target: Annotated[float | None, _positive_seconds] = None
    admin_host: Annotated[str, _text] = "127.0.0.1"
    admin_port: Annotated[int, _port] = 9595
    token_file: Annotated[Path | None, _path] = None
    viewer_token_file: Annotated[Path | None, _path] = None
    tls_cert: Annotated[Path | None, _path] = None
    tls_key: Annotated[Path | None, _path] = None
    tls_client_ca: Annotated[Path | None, _path] = None
    attach: Annotated[Path | None, _socket] = None
    weights_id: Annotated[str | None, _text] = None
    attach_require_sharing: Annotated[bool, _flag] = False
    readiness_require: Annotated[tuple[str, ...], _checks] = ()
    allowed_hosts: Annotated[tuple[str, ...], parse_host_names] = ()

    @classmethod
    def parse(cls, extra: Mapping[str, Any] | None) -> Self:
        """Raises `ConfigError` for an unknown key, a value out of range, or two keys that contradict each other."""
        parsers = {name: hint.__metadata__[0] for name, hint in get_type_hints(cls, include_extras=True).items()}
        given: dict[str, Any] = {}
        for key, value in (extra or {}).items():
            if key in _OF_VLLM:
                continue
            name = _ALIASES.get(key, key)
            if name not in parsers:
                raise misuse(key, None, f"is unknown; known keys: {', '.join(sorted((*parsers, *_ALIASES)))}")
            if name in given:
                raise misuse(key, None, f"and {name} are the same option: set only one of them")
            if value is not None:
                given[name] = parsers[name](_PREFIX + key, value)
        _check_attach(given)
        if "attach" in given:
            given.setdefault("cpu_bytes_to_use", 0)
        elif not given.keys() & {"cpu_bytes_to_use", "cpu_bytes_to_use_per_rank"}:
            share = default_size(limits_of(given.get("huge_pages", "advised")))
            given["cpu_bytes_to_use"] = min(share, given.get("max_bytes", share))
        options = cls(**given)
        if options.max_bytes is not None and options.max_bytes < options.bytes_of_rank(1):
            least = f"none, or at least the pool's size, {options.bytes_of_rank(1)}"
            raise refusal("max_bytes", options.max_bytes, least)
        if options.pin_latency_target is not None and (options.pin_chunk, options.pin_pause) != (None, None):
            contradiction = "contradicts pin_chunk and pin_pause, which fix the pace"
            raise misuse("pin_latency_target", options.pin_latency_target, contradiction)
        return options

    # All ranks have the same number of slots, so they share bytes in proportion to the size of their slots.

    def bytes_of_rank(self, num_ranks: int) -> int:
        """Return how many bytes a rank may pin before it knows the size of the other ranks' slots."""
        return self.cpu_bytes_to_use_per_rank or self.cpu_bytes_to_use // num_ranks

    def capacity_slots(self, slot_bytes: Sequence[int]) -> int:
        """How many slots fit on every rank. `slot_bytes` has the slot size of each rank. Raises `ConfigError` if not
        even one slot fits."""
        if self.cpu_bytes_to_use_per_rank is not None:
            key, value, least = "cpu_bytes_to_use_per_rank", self.cpu_bytes_to_use_per_rank, max(slot_bytes)
        else:
            key, value, least = "cpu_bytes_to_use", self.cpu_bytes_to_use, sum(slot_bytes)
        if value < least:
            raise refusal(key, value, f"at least one block, {least} bytes")
        return value // least

    def max_slots(self, slot_bytes: Sequence[int], fitting: int) -> int:
        """How many slots every rank may grow to. `fitting`: how many slots fit on the ranks' machines. Raises
        `ConfigError` if the pool's size exceeds `max_bytes`."""
        capacity = self.capacity_slots(slot_bytes)
        if self.max_bytes is None:
            return max(capacity, fitting)
        if (most := self.max_bytes // sum(slot_bytes)) < capacity:
            least = f"none, or at least the size of all pools, {capacity * sum(slot_bytes)}"
            raise refusal("max_bytes", self.max_bytes, least)
        return most

    def reserved_bytes_of_rank(self, node_bytes: int) -> int:
        """Address space for a rank's pool: as much as the pool could have if the other ranks' slots are small.
        `node_bytes` is the memory that its machine could give to pools."""
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
            curve=self.curve,
            block_tokens=block_tokens,
            transfer_timeout=self.transfer_timeout,
        )

    def public(self) -> dict[str, Any]:
        """The options that every reader of the admin API may see. Paths of this machine are left out."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if not isinstance(value, Path)}
