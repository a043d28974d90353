"""Settings of `kvstow serve`: one frozen model, read from flags, `KVSTOW_*` variables and a TOML file.

The field `extent_size` is the flag `--extent-size`, the variable `KVSTOW_EXTENT_SIZE` and the key `extent_size` of the
file. Flags win over variables, variables over the file, and the file over the defaults.

It merges three dicts. pydantic-settings could do that, but its errors do not say where a value came from, it ignores
unknown variables and a missing file, wants lists as JSON, and takes `KVSTOW_PORT=tcp://...` for a port.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from kvstow.attach.peer import overflow_uid
from kvstow.attach.worker import LONGEST_GRACE_SECONDS
from kvstow.bytesize import format_size, parse_size
from kvstow.config import ALLOWED_POLICIES, HugePages, parse_policy
from kvstow.errors import ConfigError, SettingError
from kvstow.memory.extents import STEP_BYTES
from kvstow.memory.rows import UNIT_BYTES
from kvstow_api.hostsettings import INFORMATIONAL_CHECKS, parse_host_names
from kvstow_service.admin.adminhost import AdminOptions
from kvstow_service.admin.sockets import runtime_folder
from kvstow_service.admin.tls import TlsFiles
from kvstow_service.duration import parse_duration
from kvstow_service.environment import CLIENT_VARIABLES, ENV_PREFIX, is_service_link
from kvstow_service.process.logwriter import LogFormat, LogLevel

LEAST_TRUST_EOF = LONGEST_GRACE_SECONDS + 60.0
"""The least value of `trust_eof`, in seconds. A worker may start loads for the grace period after its session has
ended, and these loads take time. With a shorter value, the memory that they read might be given to other sessions."""

# -- types of settings: each parses the raw value of a flag, a variable or a file ----------------------------------


def _positive_size(value: object) -> int:
    if isinstance(value, (str, int)) and (size := parse_size(value)):
        return size
    raise ConfigError("", value, "a size of more than 0 bytes, such as 8GiB")


def _positive_duration(value: object) -> float:
    if not (seconds := parse_duration(value)):
        raise ConfigError("", value, "more than 0 seconds")
    return seconds


def _trust_eof(value: object) -> float:
    if (seconds := parse_duration(value)) < LEAST_TRUST_EOF:
        raise ConfigError("", value, f"{LEAST_TRUST_EOF / 60:.0f}min or more, because workers use the memory that long")
    return seconds


def _port(value: object) -> int:
    if str(value).strip().isdecimal() and int(str(value)) < 1 << 16:
        return int(str(value))
    raise ConfigError("", value, "0 (any free port) to 65535")


def _flag(value: object) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if isinstance(value, (bool, str)) and str(value).lower() in words:
        return words[str(value).lower()]
    raise ConfigError("", value, "true or false")


def _checks(value: object) -> tuple[str, ...]:
    names = value.replace(",", " ").split() if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not set(names) <= set(INFORMATIONAL_CHECKS):
        raise ConfigError("", value, f"a list of {' and '.join(INFORMATIONAL_CHECKS)}")
    return tuple(names)


class Tenant(NamedTuple):
    """Users (uids) of this node who share blocks with each other, and with the users of the same tenant on other
    nodes."""

    name: str
    uids: tuple[int, ...]


_TENANT = re.compile(r"(?P<name>[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)=(?P<uids>[0-9]+(,[0-9]+)*)", re.ASCII)
_NO_UID = (1 << 32) - 1


def _tenants(value: object) -> tuple[Tenant, ...]:
    """Parse tenants. A text may hold several, separated by spaces, because a variable has only one text."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple):
        raise ConfigError("", value, "NAME=UID[,UID], such as ml=1001,1002, or a list of these")
    tenants = [_tenant(part) for text in texts for part in (text.split() if isinstance(text, str) else [text])]
    for what, counted in (
        ("name", Counter(one.name for one in tenants)),
        ("uid", Counter(str(uid) for one in tenants for uid in one.uids)),
    ):
        if counted and max(counted.values()) > 1:
            raise ConfigError("", value, f"each {what} once, and {counted.most_common(1)[0][0]} is there twice")
    return tuple(tenants)


def _disks(value: object) -> tuple[Path, ...]:
    """Parse paths. A text may hold several, separated by colons, because a variable has only one text."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str | Path) for text in texts):
        raise ConfigError("", value, "the path of a folder on a disk, or a list of these")
    paths = tuple(Path(part) for text in texts for part in str(text).split(":"))
    if not all(path.is_absolute() for path in paths):
        raise ConfigError("", value, "absolute paths, such as /mnt/nvme0")
    if len(set(paths)) < len(paths):
        raise ConfigError("", value, "each path once")
    return paths


def _tenant(value: object) -> Tenant:
    found = _TENANT.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ConfigError(
            "", value, "NAME=UID[,UID], such as ml=1001,1002; a name has up to 63 small letters, digits and hyphens"
        )
    uids = tuple(int(uid) for uid in found["uids"].split(","))
    for uid in uids:
        if uid >= _NO_UID or uid == overflow_uid():
            raise ConfigError("", value, f"the uids of users; no engine can attach as {uid}")
    return Tenant(found["name"], uids)


def _reads(parse: Any) -> BeforeValidator:
    """Turn `parse` into a validator for pydantic. Its `ConfigError` says which values are allowed."""

    def validate(value: object) -> object:
        try:
            return parse(value)
        except ConfigError as error:
            raise PydanticCustomError("not_allowed", "{allowed}", {"allowed": error.allowed}) from error

    return BeforeValidator(validate)


PositiveSize = Annotated[int, _reads(_positive_size)]
Duration = Annotated[float, _reads(parse_duration)]
PositiveDuration = Annotated[float, _reads(_positive_duration)]
TrustEOF = Annotated[float, _reads(_trust_eof)]
Port = Annotated[int, _reads(_port)]
Flag = Annotated[bool, _reads(_flag)]
Checks = Annotated[tuple[str, ...], _reads(_checks)]
Disks = Annotated[tuple[Path, ...], _reads(_disks)]
Tenants = Annotated[tuple[Tenant, ...], _reads(_tenants)]
HostNames = Annotated[tuple[str, ...], _reads(partial(parse_host_names, ""))]
Policy = Annotated[str, _reads(parse_policy)]


# -- the settings ----------------------------------------------------------------------------------------------------


def _written(text: str) -> Any:
    """A default in the form that users write. It is parsed like any other value."""
    return text


class Settings(BaseModel):
    """All settings, validated. Sizes are in bytes, times in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    memory: PositiveSize = Field(
        description="Host memory of this node for all engines and their ranks together, rounded down to a multiple of "
        "2 MiB. Required."
    )
    attach_socket: Path | None = Field(
        None,
        description="Unix socket at which engines attach. Default: /run/kvstow/attach.sock as root; for other "
        "users $XDG_RUNTIME_DIR/kvstow/attach.sock or, without that variable, kvstow-node-UID/attach.sock in /tmp.",
    )
    attach_group: str | None = Field(
        None, description="Group, by name or number, whose members may attach besides the service's own user."
    )
    trust_eof: TrustEOF | None = Field(
        None,
        description="Kernels before 6.5: how long after the end of its connection an engine in another pid namespace "
        "counts as dead, 2min or more; without it, such engines are refused.",
    )
    state: Path | None = Field(
        None, description="Folder (mode 0700) of the keeper, with which the cache survives a crash of the service."
    )
    keep_timeout: PositiveDuration = Field(
        _written("10min"), description="How long the keeper holds the memory without a service; needs --state."
    )
    start_keeper: Flag = Field(
        True,
        description="Start a keeper if none runs; otherwise wait for one that is started elsewhere, such as `kvstow "
        "keeper` in a container of its own. Needs --state.",
    )
    keep_on_stop: Flag = Field(
        False, description="Leave the memory to the keeper on SIGTERM too; otherwise it is given back. Needs --state."
    )
    tier: str | None = Field(
        None,
        description="Store, shared by several nodes, for what this one has no room for: mooncake://MASTER:PORT. Docs: "
        "tier.md.",
    )
    disk: Disks = Field(
        (),
        description="Folder on a disk of this node (ext4 or XFS) for what memory has no room for. KVStow makes a "
        "folder kvstow in it. May be repeated, with another disk each time. Docs: disk.md.",
    )
    disk_size: PositiveSize | None = Field(
        None,
        description="Size of the data file on each disk. Default: 80 % of the space that is free at the first start, "
        "with 15 % of the file system left free; on the root file system there is no default.",
    )
    disk_writes: PositiveSize | None = Field(
        None,
        description="How much may be written to each disk in a day, such as 8TB, so that it lasts; without it, there "
        "is no bound.",
    )
    tenant: Tenants = Field(
        (),
        description="NAME=UID[,UID]: engines of these users share blocks through the store of --tier with those of the "
        "same tenant, also on other nodes. May be repeated; no other users use the store. Without it, only engines of "
        "the service's own user use it.",
    )
    extent_size: PositiveSize = Field(
        _written("1GiB"), description="Unit in which pools get memory, a multiple of 2 MiB."
    )
    huge_pages: HugePages = Field(
        "advised",
        description="Ask the kernel for transparent huge pages (advised), or use the 2 MiB pages that the machine has "
        "reserved (reserved).",
    )
    pin_chunk: PositiveSize = Field(
        _written("64MiB"),
        description="Pace of populating: memory populated per step, a multiple of 2 MiB, at most 64MiB.",
    )
    pin_pause: Duration = Field(_written("2ms"), description="Pace of populating: pause between two steps.")
    policy: Policy = Field("auto", description=f"How pools choose what they evict: {ALLOWED_POLICIES}.")
    curve: Flag = Field(True, description="Estimate what pools of other sizes would hit, from a sample of the keys.")
    host: str = Field(
        "127.0.0.1",
        description="Address of the admin server; other than loopback, it needs --token-file or --tls-client-ca.",
    )
    port: Port = Field(9595, description="Port of the admin server; 0 picks a free one.")
    admin_socket: Path | None = Field(
        None,
        description="Unix socket of the admin server, through which the service's user and root may change things; "
        "over TCP that needs a token. Default: /run/kvstow-admin/admin.sock as root; for other users "
        "$XDG_RUNTIME_DIR/kvstow-admin/admin.sock or, without that variable, kvstow-admin-UID/admin.sock in /tmp.",
    )
    admin_group: str | None = Field(
        None, description="Group, by name or number, whose members may use the admin socket, too."
    )
    token_file: Path | None = Field(
        None, description="File with the bearer token that requests over TCP need to change anything."
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
    log_format: LogFormat = Field("text", description="Format of log lines: text or json.")
    log_level: LogLevel = Field("info", description="Lowest level that is logged: debug, info, warning or error.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        groups = self._memory_conflicts(), self._keeper_conflicts(), self._store_conflicts(), self._admin_conflicts()
        for key, problem in chain.from_iterable(groups):
            raise _conflict(key, problem)
        return self

    # Each check yields the setting at fault, and the end of a sentence that begins with the setting and its value.

    def _memory_conflicts(self) -> Iterator[tuple[str, str]]:
        if self.memory < UNIT_BYTES:
            yield "memory", "is less than 2 MiB, the smallest unit of memory that a pool can get"
        if self.extent_size % UNIT_BYTES:
            yield "extent_size", "is not a multiple of 2 MiB, such as 1GiB"
        if self.pin_chunk > STEP_BYTES:
            yield "pin_chunk", f"is more than {format_size(STEP_BYTES)}, by which memory becomes usable"

    def _keeper_conflicts(self) -> Iterator[tuple[str, str]]:
        for key, is_used in (
            ("keep_on_stop", self.keep_on_stop),
            ("keep_timeout", "keep_timeout" in self.model_fields_set),
            ("start_keeper", not self.start_keeper),
        ):
            if is_used and self.state is None:
                yield key, "needs --state, the folder of the keeper that holds the memory"
        if "keep_timeout" in self.model_fields_set and not self.start_keeper:
            yield "keep_timeout", "has no effect with --no-start-keeper: `kvstow keeper` takes it"

    def _store_conflicts(self) -> Iterator[tuple[str, str]]:
        if self.tenant and self.tier is None and not self.disk:
            yield "tenant", "needs --tier or --disk, the store through which tenants share blocks"
        if self.disk and self.tier is not None:
            yield "disk", "cannot be given together with --tier: a node has one store below its pools"
        for key in ("disk_size", "disk_writes"):
            if getattr(self, key) is not None and not self.disk:
                yield key, "needs --disk"

    def _admin_conflicts(self) -> Iterator[tuple[str, str]]:
        for key in ("tls_key", "tls_client_ca"):
            if getattr(self, key) is not None and self.tls_cert is None:
                yield key, "needs --tls-cert"
        shared, own = self.attach_path.parent, self.admin_path.parent
        if shared == own or (self.admin_socket is not None and own.is_relative_to(shared)):
            yield "admin_socket", f"is in {shared}, the folder of the attach socket, which engines may enter"
        if self.viewer_token_file is not None and self.token_file is None and self.tls_client_ca is None:
            yield "viewer_token_file", "needs --token-file or --tls-client-ca"

    def admin_options(self, host: str) -> AdminOptions:
        """`host` is the numeric address of `self.host`. Raises `ConfigError`."""
        tls = None if self.tls_cert is None else TlsFiles(self.tls_cert, self.tls_key, self.tls_client_ca)
        return AdminOptions(
            host=host,
            port=self.port,
            token_file=self.token_file,
            viewer_token_file=self.viewer_token_file,
            tls=tls,
            readiness_require=self.readiness_require,
            allowed_hosts=self.allowed_hosts,
        )

    @property
    def attach_path(self) -> Path:
        """The socket at which engines attach."""
        return self.attach_socket or runtime_folder("kvstow", "kvstow-node") / "attach.sock"

    @property
    def admin_path(self) -> Path:
        """The socket at which the service's user makes changes."""
        return self.admin_socket or runtime_folder("kvstow-admin", "kvstow-admin") / "admin.sock"

    @property
    def tenants(self) -> dict[int, str]:
        """The names of the tenants by uid."""
        return {uid: one.name for one in self.tenant for uid in one.uids}

    @property
    def budget_bytes(self) -> int:
        """`memory` rounded down to whole 2 MiB units."""
        return self.memory - self.memory % UNIT_BYTES


class _Given(NamedTuple):
    """A raw value and the name under which the user gave it."""

    value: object
    label: str


def load_settings(flags: Mapping[str, object], environ: Mapping[str, str], config: Path | None = None) -> Settings:
    """Settings from `flags` (by field name; None means not given), `environ` and the file `config`. If `config` is
    None, the file is the one that `KVSTOW_CONFIG` names. An empty variable counts as not given.

    Raises an `ExceptionGroup` with one `ConfigError` for each wrong key or value, under the name that the user gave it.
    """
    if config is None and environ.get(ENV_PREFIX + "CONFIG"):
        config = Path(environ[ENV_PREFIX + "CONFIG"])
    by_flag = {key: _Given(value, flag_name(key)) for key, value in flags.items() if value is not None}
    given = {**_from_file(config), **_from_environ(environ), **by_flag}
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
    _refuse_unknown({f"{path}: {key}": key for key in values}, sorted(Settings.model_fields))
    return {key: _Given(value, f"{path}: {key}") for key, value in values.items()}


def _from_environ(environ: Mapping[str, str]) -> dict[str, _Given]:
    ours = {
        name: value
        for name, value in environ.items()
        if name.startswith(ENV_PREFIX) and value and name not in CLIENT_VARIABLES and not is_service_link(name, value)
    }
    allowed = [*sorted(ENV_PREFIX + key.upper() for key in Settings.model_fields), ENV_PREFIX + "CONFIG"]
    fields = {ENV_PREFIX + key.upper(): key for key in Settings.model_fields}
    keys = {name: fields.get(name, name) for name in ours if name != ENV_PREFIX + "CONFIG"}
    _refuse_unknown(keys, allowed)
    return {key: _Given(ours[name], name) for name, key in keys.items()}


def _refuse_unknown(keys: Mapping[str, str], allowed: list[str]) -> None:
    """Raise errors for unknown keys. `keys` maps the name under which the user gave a key to the key."""
    problems = [
        SettingError(label, None, "is not a setting; the settings are " + ", ".join(allowed))
        for label, key in keys.items()
        if key not in Settings.model_fields
    ]
    if problems:
        raise ExceptionGroup("settings", problems)


def _conflict(key: str, problem: str) -> PydanticCustomError:
    return PydanticCustomError("conflict", "{problem}", {"problem": problem, "key": key})


def _explain(problem: ErrorDetails, given: Mapping[str, _Given]) -> ConfigError:
    if problem["type"] == "missing":  # only `memory` has no default
        return SettingError("--memory", None, "is required: the host memory of this node for KV caches, such as 64GiB")
    context = problem.get("ctx", {})
    key = str(context["key"] if problem["type"] == "conflict" else problem["loc"][0])
    raw = given.get(key, _Given(Settings.model_fields[key].default, flag_name(key)))
    if problem["type"] == "conflict":
        label = f"--no-{raw.label[2:]}" if raw.value is False and raw.label == flag_name(key) else raw.label
        return SettingError(label, raw.value, context["problem"])
    return ConfigError(raw.label, raw.value, context.get("expected", problem["msg"]))
