"""Settings of `kvstow serve`: one frozen model, read from flags, `KVSTOW_*` variables and a TOML file.

The field `pool_size` is the flag `--pool-size`, the variable `KVSTOW_POOL_SIZE` and the key `pool_size` of the
file. Flags win over variables, variables over the file, and the file over the defaults.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
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
from kvstow_service.replay.place import Place
from kvstow_service.replay.shapes import SHAPES, DeviceName
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
from kvstow_service.tls import TlsFiles


def _written(text: str) -> Any:
    """A default in the form users write; it is parsed like any other value."""
    return text


class Settings(BaseModel):
    """All settings, validated. Sizes are in bytes, times in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    device: DeviceName = Field("cpu", description="Device that holds the KV cache: cpu or cuda.")
    ranks: Count = Field(1, description="Number of ranks in this process.")
    pool_size: Size = Field(_written("8GiB"), description="Host memory for the pool, per rank.")
    slot_size: PositiveSize = Field(_written("2MiB"), description="Bytes of one block, per rank.")
    shape: Shape = Field(
        None, description=f"Use a known model's KV cache layout, which sets the slot size: {' or '.join(SHAPES)}."
    )
    copy_strategy: CopyStrategy = Field(
        "auto",
        description="How CUDA copies: page by page (direct), in packed blocks (staged), or the faster one (auto).",
    )
    pool_max_size: Size | None = Field(
        None,
        description="Size to which the pool may grow at runtime, per rank; by default a share of the machine's memory.",
    )
    policy: Policy = Field("lru", description=f"Eviction policy: {' or '.join(POLICIES)}.")
    host: str = Field(
        "127.0.0.1",
        description="Address of the admin server; other than loopback, it needs --token-file or --tls-client-ca.",
    )
    port: Port = Field(9595, description="Port of the admin server; 0 picks a free one.")
    uds: Path | None = Field(None, description="Also listen on this Unix socket (mode 0600).")
    token_file: Path | None = Field(
        None, description="File with the bearer token that requests need to change anything."
    )
    viewer_token_file: Path | None = Field(
        None, description="File with a bearer token for reading only; without it, reading needs no token."
    )
    allowed_hosts: HostNames = Field(
        (), description="Host headers, besides localhost, that a server on loopback accepts."
    )
    tls_cert: Path | None = Field(None, description="Certificate (PEM) of the admin server; turns on TLS for TCP.")
    tls_key: Path | None = Field(
        None, description="Private key (PEM) of the certificate, unless it is in the same file."
    )
    tls_client_ca: Path | None = Field(
        None, description="CA certificates (PEM); a client certificate that they signed counts as an admin token."
    )
    pin_pace: Literal["adaptive", "fixed"] | None = Field(
        None, description="Pace of pinning; adaptive unless --pin-chunk or --pin-pause is given."
    )
    pin_latency_target: PositiveDuration | None = Field(
        None,
        description="Adaptive pace: how much longer pinning may make a step of the GPU's other users. Default: 1ms.",
    )
    pin_chunk: PositiveSize | None = Field(None, description="Fixed pace: memory pinned per step. Default: 64MiB.")
    pin_pause: Duration | None = Field(
        None, description="Fixed pace: pause between two steps of pinning. Default: 2ms."
    )
    lock: Flag = Field(True, description="Lock the pool in memory; otherwise it is only populated.")
    huge_pages: HugePages = Field(
        "advised",
        description="Ask the kernel for transparent huge pages (advised), or use the 2 MiB pages that the machine has "
        "reserved (reserved).",
    )
    kv_blocks: Count | None = Field(
        None, description="Number of blocks in the device's KV cache, per rank; by default as many as the replay needs."
    )
    readiness_require: Checks = Field(
        (),
        description="Further checks that /readyz needs: pool (the first slots are usable), pinned (all of them are).",
    )
    shutdown_delay: Duration = Field(
        _written("500ms"),
        description="How long /readyz fails after SIGTERM before anything stops, so that load balancers notice.",
    )
    drain_deadline: Duration = Field(_written("10s"), description="How long traffic may take to drain after that.")
    transfer_timeout: PositiveDuration = Field(_written("30s"), description="Age at which a transfer counts as stuck.")
    replay: Path | None = Field(None, description="Replay this request trace (JSON lines) against the service.")
    replay_requests: Count | None = Field(None, description="Replay only this many requests of the trace.")
    replay_concurrency: Count = Field(1, description="Number of replayed requests in flight.")
    replay_rate: Rate | None = Field(
        None, description="Replayed requests started per second; by default as fast as possible."
    )
    replay_time_scale: Rate | None = Field(None, description="Follow the trace's timestamps, this many times as fast.")
    exit_after_replay: Flag = Field(False, description="Stop when the replay ends.")
    log_format: LogFormat = Field("text", description="Format of log lines: text or json.")
    log_level: LogLevel = Field("info", description="Lowest level that is logged: debug, info, warning or error.")

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
    def _check(self) -> Self:
        for key, problem in self._conflicts():
            raise _conflict(key, problem)
        return self

    def _conflicts(self) -> Iterator[tuple[str, str]]:
        """The setting at fault, and the end of a sentence that begins with it and its value."""
        if self._is_pace_fixed and self.pin_latency_target is not None:
            yield "pin_latency_target", "needs an adaptive pace: --pin-pace fixed, --pin-chunk and --pin-pause fix it"
        if self._is_pace_fixed and self.pin_pace == "adaptive":
            yield "pin_pace", "cannot be combined with --pin-chunk or --pin-pause, which fix the pace"
        if self.pool_size < self.slot_size:
            yield "pool_size", f"is less than one slot, {format_size(self.slot_size)}"
        if self.pool_max_size is not None and self.pool_max_size < self.pool_size:
            yield "pool_max_size", f"is less than --pool-size {format_size(self.pool_size)}"
        if self.device == "cuda" and not self.lock:
            yield "lock", "cannot be combined with --device cuda: CUDA copies from registered memory only"
        if self.device == "cpu" and self.copy_strategy != "auto":
            yield "copy_strategy", "needs --device cuda"
        for key in ("tls_key", "tls_client_ca"):
            if getattr(self, key) is not None and self.tls_cert is None:
                yield key, "needs --tls-cert"
        if self.viewer_token_file is not None and self.token_file is None and self.tls_client_ca is None:
            yield "viewer_token_file", "needs --token-file or --tls-client-ca"
        if self.replay_rate is not None and self.replay_time_scale is not None:
            yield "replay_time_scale", "cannot be combined with --replay-rate"
        if self.replay is None and self.exit_after_replay:
            yield "exit_after_replay", "needs --replay"

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
        """One rank's pool. Without `pool_max_size` all ranks together may grow into `memory_left` bytes."""
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
    """A raw value and the name under which the user gave it."""

    value: object
    label: str


def load_settings(flags: Mapping[str, object], environ: Mapping[str, str], config: Path | None = None) -> Settings:
    """Settings from `flags` (by field name; None means not given), `environ` and the file `config` or, if that is
    None, the one that `KVSTOW_CONFIG` names. An empty variable counts as not given.

    Raises an `ExceptionGroup` with one `ConfigError` for each wrong key or value, under the name that the user gave it.
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
