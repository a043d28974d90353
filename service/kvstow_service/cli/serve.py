"""`kvstow serve`: its flags are the fields of `Settings`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo

from kvstow.errors import ConfigError, InvalidRequestError, KvstowError
from kvstow_service.settings import Settings, flag_name, load_settings

_CONFIG_HELP = "TOML file with settings, under the flags' names with underscores. KVSTOW_CONFIG names it, too."


def serve(config: Path | None = None, **flags: str | bool | None) -> None:
    """Run the service: engine, data plane and admin server in one process.

    Every flag is also a variable (KVSTOW_POOL_SIZE) and a key of the --config file (pool_size); flags win over
    variables, variables over the file.
    """
    raise typer.Exit(_run(config, flags))


def _run(config: Path | None, flags: dict[str, str | bool | None]) -> int:
    """The exit status: 2 for a wrong setting, 1 for anything else that keeps the service from running."""
    try:
        settings = load_settings(flags, os.environ, config)
    except ExceptionGroup as group:
        return _complain(group.exceptions, 2)

    from kvstow_service.standalone import run_service  # FastAPI, uvicorn

    try:
        return run_service(settings)
    except (ConfigError, InvalidRequestError) as error:
        return _complain([error], 2)
    except KvstowError as error:
        return _complain([error], 1)


def _complain(errors: Sequence[Exception], status: int) -> int:
    for error in errors:
        typer.echo(f"kvstow serve: {error}", err=True)
    return status


def _flag(key: str, field: FieldInfo) -> inspect.Parameter:
    """The flag of one setting. Values stay text, so that every source is read by the same rules."""
    flag, is_switch = flag_name(key), field.annotation is bool
    default = "" if field.default in (None, (), False) else f" Default: {field.default}."
    option = typer.Option(
        f"{flag}/--no-{flag[2:]}" if is_switch else flag,
        help=f"{field.description}{default}",
        show_default=False,
        metavar=None if is_switch else "VALUE",
    )
    annotation: Any = Annotated[bool | None if is_switch else str | None, option]
    return inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _config_flag() -> inspect.Parameter:
    annotation: Any = Annotated[Path | None, typer.Option("--config", help=_CONFIG_HELP)]
    return inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


# One list of settings: typer reads the command line off this signature.
_PARAMETERS = [_config_flag(), *(_flag(key, field) for key, field in Settings.model_fields.items())]
serve.__signature__ = inspect.Signature(_PARAMETERS)  # type: ignore[attr-defined]
serve.__annotations__ = {parameter.name: parameter.annotation for parameter in _PARAMETERS}
