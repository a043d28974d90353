"""Types of settings: each parses the raw value of a flag, a variable or a file."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from kvstow.bytesize import parse_size
from kvstow.config import parse_policy
from kvstow.errors import ConfigError
from kvstow_api.hostsettings import INFORMATIONAL_CHECKS, parse_host_names
from kvstow_service.duration import parse_duration


def _size(value: object) -> int:
    if not isinstance(value, (str, int)):
        raise ConfigError("", value, "a size such as 8GiB")
    return parse_size(value)


def _positive_size(value: object) -> int:
    if not (size := _size(value)):
        raise ConfigError("", value, "more than 0 bytes")
    return size


def _positive_duration(value: object) -> float:
    if not (seconds := parse_duration(value)):
        raise ConfigError("", value, "more than 0 seconds")
    return seconds


def _port(value: object) -> int:
    if type(value) is int or (isinstance(value, str) and value.strip().isdecimal()):
        number = int(value)
        if 0 <= number < 1 << 16:
            return number
    raise ConfigError("", value, "0 (any free port) to 65535")


def _flag(value: object) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    raise ConfigError("", value, "true or false")


def _checks(value: object) -> tuple[str, ...]:
    names = value.replace(",", " ").split() if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not set(names) <= set(INFORMATIONAL_CHECKS):
        raise ConfigError("", value, f"a list of {' and '.join(INFORMATIONAL_CHECKS)}")
    return tuple(names)


def _reads(parse: Any) -> BeforeValidator:
    """`parse` as a validator for pydantic. Its `ConfigError` says what is allowed."""

    def validate(value: object) -> object:
        try:
            return parse(value)
        except ConfigError as error:
            raise PydanticCustomError("not_allowed", "{allowed}", {"allowed": error.allowed}) from error

    return BeforeValidator(validate)


PositiveSize = Annotated[int, _reads(_positive_size)]
Duration = Annotated[float, _reads(parse_duration)]
PositiveDuration = Annotated[float, _reads(_positive_duration)]
Port = Annotated[int, _reads(_port)]
Flag = Annotated[bool, _reads(_flag)]
Checks = Annotated[tuple[str, ...], _reads(_checks)]
HostNames = Annotated[tuple[str, ...], _reads(partial(parse_host_names, ""))]
Policy = Annotated[str, _reads(parse_policy)]
