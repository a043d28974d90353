"""`kvstow serve`. Its flags are the fields of `Settings`."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import click
from pydantic.fields import FieldInfo

from kvstow.errors import ConfigError, InvalidRequestError, KvstowError, MissingPackageError
from kvstow_service.node.settings import Settings, flag_name, load_settings

_CONFIG_HELP = "TOML file with settings, named like the flags but with underscores. Default: KVSTOW_CONFIG."


_REPEATED = frozenset({"tenant", "disk"})
"""Settings whose flags may be given more than once."""


def _run(config: Path | None, flags: dict[str, object]) -> int:
    """Run the service. Returns the exit status: 2 for an invalid setting, 1 for any other failure."""
    try:
        settings = load_settings(flags, os.environ, config)
    except ExceptionGroup as group:
        return _complain(group.exceptions, 2)

    gc.disable()  # imported objects stay, and collections that walked them took a tenth of the start
    try:
        from kvstow_service.node.nodeprocess import run_service  # imports FastAPI and uvicorn
    finally:
        gc.freeze()
        gc.enable()

    try:
        return run_service(settings)
    except ConfigError as error:
        return _complain([_named_as_flag(error)], 2)
    except (InvalidRequestError, MissingPackageError) as error:
        return _complain([error], 2)
    except KvstowError as error:
        return _complain([error], 1)


def _named_as_flag(error: ConfigError) -> ConfigError:
    """Return the error with flags in place of the names of settings."""
    allowed = re.sub(r"\b[a-z]+(_[a-z]+)+\b", _flag_of, error.allowed)
    key = flag_name(error.key) if error.key in Settings.model_fields else error.key
    return type(error)(key, error.value, allowed)


def _flag_of(match: re.Match[str]) -> str:
    return flag_name(match[0]) if match[0] in Settings.model_fields else match[0]


def _complain(errors: Sequence[Exception], status: int) -> int:
    for error in errors:
        click.echo(f"kvstow serve: {error}", err=True)
    return status


def _option(key: str, field: FieldInfo) -> click.Option:
    """Make the flag of one setting. Its value stays text, so that flags, variables and files are parsed by the same
    rules."""
    flag, is_switch = flag_name(key), field.annotation is bool
    has_default = not field.is_required() and field.default not in (None, (), False)
    return click.Option(
        [f"{flag}/--no-{flag[2:]}" if is_switch else flag],
        help=f"{field.description} Default: {field.default}." if has_default else field.description,
        default=None,
        metavar=None if is_switch else "VALUE",
        multiple=key in _REPEATED,
    )


def _serve(config: str | None, **flags: object) -> None:
    """Run the node service: the host memory that the engines of this machine share.

    Engines attach at a Unix socket, and copy their KV cache to and from the memory by themselves. The admin server
    answers at once; the memory is populated in the background.

    Every flag is also a variable (KVSTOW_MEMORY) and a key of the --config file (memory). Flags override variables, and
    variables override the file.
    """
    given = {key: None if value == () else value for key, value in flags.items()}
    sys.exit(_run(None if config is None else Path(config), given))


serve = click.Command(
    "serve",
    help=_serve.__doc__,
    callback=_serve,
    params=[
        click.Option(["--config"], metavar="FILE", help=_CONFIG_HELP),
        *(_option(key, field) for key, field in Settings.model_fields.items()),
    ],
)
