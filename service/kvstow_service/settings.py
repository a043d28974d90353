"""Settings of `kvstow serve`: one frozen model, filled from flags, `KVSTOW_*` variables and a TOML file.

A field `pool_size` is the flag `--pool-size`, the variable `KVSTOW_POOL_SIZE` and the key `pool_size` of the
file; flags win over variables, variables over the file, the file over the defaults.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from kvstow.bytesize import format_size
from kvstow.config import POLICIES, CopyStrategy, EngineConfig, HugePages, PoolConfig
from kvstow.errors import ConfigError, SettingError
from kvstow.memory.pace import CHUNK_BYTES
from kvstow_service.adminoptions import AdminOptions
from kvstow_service.environment import CLIENT_VARIABLES, ENV_PREFIX, is_service_link
from kvstow_service.logformat import LogFormat, LogLevel
from kvstow_service.place import Place
from kvstow_service.settingtypes import (
    Checks,
    Count,
    Duration,
    Flag,
    HostNames,
    Policy,
    Port,
    PositiveDuration,
    PositiveSize,
    Rate,
    Shape,
    Size,
)
from kvstow_service.shapes import SHAPES, DeviceName
from kvstow_service.tls import TlsFiles


def _written(text: str) -> Any:
    """A default as people write it; it is read like any other value."""
    return text


class Settings(BaseModel):
    """All of it, validated. Sizes in bytes, times in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    device: DeviceName = Field("cpu", description="Device that holds the KV cache: cpu or cuda.")
    ranks: Count = Field(1, description="Ranks in this process.")
    pool_size: Size = Field(_written("8GiB"), description="Host memory of the pool, per rank.")
    slot_size: PositiveSize = Field(_written("2MiB"), description="Bytes of one block, per rank.")
    shape: Shape = Field(None, description=f"KV cache of a known model in place of a slot size: {' or '.join(SHAPES)}.")
    copy_strategy: CopyStrategy = Field(
        "auto", description="On CUDA, copy page by page (direct), in packed blocks (staged), or as measured (auto)."
    )
    pool_max_size: Size | None = Field(
        None,
        description="How far the pool may grow at runtime, per rank; by default the ranks' share of the machine.",
    )
    policy: Policy = Field("lru", description=f"Order of eviction: {' or '.join(POLICIES)}.")
    host: str = Field("127.0.0.1", description="Address of the admin server; other than loopback needs a token file.")
    port: Port = Field(9595, description="Port of the admin server; 0 takes any free one.")
    uds: Path | None = Field(None, description="Listen on this Unix socket (mode 0600) as well.")
    token_file: Path | None = Field(None, description="File with the bearer token that changing requests need.")
    viewer_token_file: Path | None = Field(
        None, description="File with the bearer token that is enough for reading; without, reading is open."
    )
    allowed_hosts: HostNames = Field(
        (), description="Names beside localhost under which clients may ask a server on loopback (Host header)."
    )
    tls_cert: Path | None = Field(None, description="Certificate (PEM) of the admin server: TCP then speaks TLS.")
    tls_key: Path | None = Field(None, description="Key (PEM) of the certificate, unless it is in the same file.")
    tls_client_ca: Path | None = Field(
        None, description="Authorities (PEM) whose client certificates count as the admin's token."
    )
    pin_pace: Literal["adaptive", "fixed"] | None = Field(
        None, description="Pace of pinning; adaptive, unless a chunk or a pause is given."
    )
    pin_latency_target: PositiveDuration | None = Field(
        None, description="What an adaptive pace may add to a step of the GPU's other users; 1ms if not given."
    )
    pin_chunk: PositiveSize | None = Field(
        None, description="Fixed pace: memory made ready per step of pinning; 64MiB if not given."
    )
    pin_pause: Duration | None = Field(
        None, description="Fixed pace: rest between two steps of pinning; 2ms if not given."
    )
    lock: Flag = Field(True, description="Lock the pool in memory; without, it is only populated.")
    huge_pages: HugePages = Field(
        "advised",
        description="Ask the kernel for huge pages where it has some (advised), or take the pool from the 2 MiB pages "
        "that the machine has reserved (reserved).",
    )
    kv_blocks: Count | None = Field(
        None, description="Blocks of the device's KV cache, per rank; by default as many as the replay needs."
    )
    readiness_require: Checks = Field(
        (), description="Checks that must pass before /readyz does: pool (first slots), pinned (all of them)."
    )
    shutdown_delay: Duration = Field(
        _written("500ms"),
        description="After SIGTERM, how long /readyz fails before anything stops, so that routers notice.",
    )
    drain_deadline: Duration = Field(_written("10s"), description="After that, how long traffic may take to drain.")
    transfer_timeout: PositiveDuration = Field(_written("30s"), description="Age at which a transfer counts as stuck.")
    replay: Path | None = Field(None, description="Drive the service with this request trace (JSON lines).")
    replay_requests: Count | None = Field(None, description="Replay only so many requests of the trace.")
    replay_concurrency: Count = Field(1, description="Requests of the replay in flight at once.")
    replay_rate: Rate | None = Field(
        None, description="Requests the replay starts per second; by default as fast as possible."
    )
    replay_time_scale: Rate | None = Field(
        None, description="Replay by the trace's timestamps, this many times as fast."
    )
    exit_after_replay: Flag = Field(False, description="Stop once the replay has ended.")
    log_format: LogFormat = Field("text", description="Log lines for people (text) or machines (json).")
    log_level: LogLevel = Field("info", description="Least level logged: debug, info, warning or error.")

    @model_validator(mode="before")
    @classmethod
    def _slot_of_shape(cls, given: Any) -> Any:
        """A shape also sets the size of a slot."""
        if not isinstance(given, dict) or given.get("shape") not in SHAPES:
            return given
        if "slot_size" in given:
            raise _conflict("slot_size", "cannot be combined with --shape, which sets it")
        return {**given, "slot_size": SHAPES[given["shape"]].slot_bytes}

    @model_validator(mode="after")
    def _check_pace(self) -> Self:
        if self._is_pace_fixed and self.pin_latency_target is not None:
            raise _conflict(
                "pin_latency_target", "needs an adaptive pace: --pin-pace fixed, --pin-chunk and --pin-pause fix it"
            )
        if self._is_pace_fixed and self.pin_pace == "adaptive":
            raise _conflict("pin_pace", "cannot be combined with --pin-chunk or --pin-pause, which fix the pace")
        return self

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.pool_size < self.slot_size:
            raise _conflict("pool_size", f"is less than one slot, {format_size(self.slot_size)}")
        if self.pool_max_size is not None and self.pool_max_size < self.pool_size:
            raise _conflict("pool_max_size", f"is less than --pool-size {format_size(self.pool_size)}")
        return self

    @model_validator(mode="after")
    def _check_device(self) -> Self:
        if self.device == "cuda" and not self.lock:
            raise _conflict("lock", "cannot be combined with --device cuda: CUDA copies from registered memory only")
        if self.device == "cpu" and self.copy_strategy != "auto":
            raise _conflict("copy_strategy", "needs --device cuda")
        return self

    @model_validator(mode="after")
    def _check_credentials(self) -> Self:
        for key in ("tls_key", "tls_client_ca"):
            if getattr(self, key) is not None and self.tls_cert is None:
                raise _conflict(key, "needs --tls-cert")
        if self.viewer_token_file is not None and self.token_file is None and self.tls_client_ca is None:
            raise _conflict("viewer_token_file", "needs --token-file or --tls-client-ca")
        return self

    @model_validator(mode="after")
    def _check_replay(self) -> Self:
        if self.replay_rate is not None and self.replay_time_scale is not None:
            raise _conflict("replay_time_scale", "cannot be combined with --replay-rate")
        if self.replay is None and self.exit_after_replay:
            raise _conflict("exit_after_replay", "needs --replay")
        return self

    @property
    def _is_pace_fixed(self) -> bool:
        return self.pin_pace == "fixed" or self.pin_chunk is not None or self.pin_pause is not None

    def admin_options(self, host: str) -> AdminOptions:
        """`host` is the numeric address of `self.host`. Raises `ConfigError`."""
        tls = None if self.tls_cert is None else TlsFiles(self.tls_cert, self.tls_key, self.tls_client_ca)
        return AdminOptions(
            host=host,
            port=self.port,
            uds=self.uds,
            token_file=self.token_file,
            viewer_token_file=self.viewer_token_file,
            tls=tls,
            readiness_require=self.readiness_require,
            allowed_hosts=self.allowed_hosts,
        )

    @property
    def place(self) -> Place:
        return Place(self.device, None if self.shape is None else SHAPES[self.shape], self.copy_strategy)

    @property
    def capacity_slots(self) -> int:
        return self.pool_size // self.slot_size

    def engine_config(self, block_tokens: int | None) -> EngineConfig:
        return EngineConfig(
            slot_bytes=self.slot_size,
            capacity_slots=self.capacity_slots,
            num_ranks=self.ranks,
            policy=self.policy,
            block_tokens=block_tokens,
            transfer_timeout=self.transfer_timeout,
        )

    def pool_config(self, memory_left: int) -> PoolConfig:
        """One rank's pool; unless a bound is set, the ranks may grow into `memory_left` bytes together."""
        return PoolConfig(
            slot_bytes=self.slot_size,
            pool_bytes=self.pool_size,
            max_bytes=self.pool_max_size or max(self.pool_size, memory_left // self.ranks),
            chunk_bytes=self.pin_chunk or (CHUNK_BYTES if self._is_pace_fixed else None),
            pause=self.pin_pause,
            latency_target=self.pin_latency_target,
            lock=self.lock,
            huge_pages=self.huge_pages,
        )


class _Given(NamedTuple):
    """A raw value and what its user calls it."""

    value: object
    label: str


def load_settings(flags: Mapping[str, object], environ: Mapping[str, str], config: Path | None = None) -> Settings:
    """Settings from `flags` (by field name; None is not given), `environ` and the file `config`, which
    `KVSTOW_CONFIG` may name instead. An empty variable is not given.

    Raises a group of `ConfigError`, one for each wrong key or value, by the name its user gave it.
    """
    if config is None and environ.get(ENV_PREFIX + "CONFIG"):
        config = Path(environ[ENV_PREFIX + "CONFIG"])
    given = {
        **_from_file(config),
        **_from_environ(environ),
        **{key: _Given(value, flag_name(key)) for key, value in flags.items() if value is not None},
    }
    try:
        return Settings.model_validate({key: raw.value for key, raw in given.items()})
    except ValidationError as error:
        raise ExceptionGroup("settings", [_explain(problem, given) for problem in error.errors()]) from error


def flag_name(key: str) -> str:
    return "--" + key.replace("_", "-")


def _from_file(path: Path | None) -> dict[str, _Given]:
    if path is None:
        return {}
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problem = SettingError("--config", path, f"is not a readable TOML file: {error}")
        raise ExceptionGroup("settings", [problem]) from error
    allowed = sorted(Settings.model_fields)
    _refuse_unknown([f"{path}: {key}" for key in values if key not in allowed], allowed)
    return {key: _Given(value, f"{path}: {key}") for key, value in values.items()}


def _from_environ(environ: Mapping[str, str]) -> dict[str, _Given]:
    ours = {
        name: value
        for name, value in environ.items()
        if name.startswith(ENV_PREFIX) and value and name not in CLIENT_VARIABLES and not is_service_link(name, value)
    }
    fields = {ENV_PREFIX + key.upper(): key for key in Settings.model_fields}
    allowed = [*sorted(fields), ENV_PREFIX + "CONFIG"]
    _refuse_unknown([name for name in ours if name not in allowed], allowed)
    return {fields[name]: _Given(value, name) for name, value in ours.items() if name in fields}


def _refuse_unknown(unknown: list[str], allowed: list[str]) -> None:
    if unknown:
        problem = "is not a setting; the settings are " + ", ".join(allowed)
        raise ExceptionGroup("settings", [SettingError(label, None, problem) for label in unknown])


def _conflict(key: str, problem: str) -> PydanticCustomError:
    return PydanticCustomError("conflict", "{problem}", {"problem": problem, "key": key})


def _explain(problem: ErrorDetails, given: Mapping[str, _Given]) -> ConfigError:
    context = problem.get("ctx", {})
    key = str(context["key"] if problem["type"] == "conflict" else problem["loc"][0])
    raw = given.get(key, _Given(Settings.model_fields[key].default, flag_name(key)))
    if problem["type"] == "conflict":
        label = f"--no-{raw.label[2:]}" if raw.value is False and raw.label == flag_name(key) else raw.label
        return SettingError(label, raw.value, context["problem"])
    return ConfigError(raw.label, raw.value, context.get("expected", problem["msg"]))
