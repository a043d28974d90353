"""The servers that a user has given names: a TOML file with a table for each, and the name of the current one.

current = "prod"

[contexts.prod]
server = "https://kvstow.example.com:9595"
token_file = "/home/me/.kvstow-token"
"""

from __future__ import annotations

import json
import os
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from kvstow.errors import ConfigError
from kvstow_service.environment import CONTEXTS

_NAMES = "letters, digits, - and _"


@dataclass(frozen=True, slots=True)
class Context:
    """One server, and what it takes to be let in. Paths are absolute."""

    server: str
    token_file: str | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None


@dataclass(frozen=True, slots=True)
class ContextFile:
    """What the file says; nothing, where there is none."""

    path: Path
    contexts: Mapping[str, Context] = field(default_factory=dict)
    current: str | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Self:
        """The file that the environment names, or else the user's own. Raises `ConfigError` for one that is wrong."""
        path = _path(environ)
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return cls(path)
        except (OSError, ValueError) as error:
            raise ConfigError(CONTEXTS, str(path), f"a TOML file ({error})") from error
        known = {"current", "contexts"}
        tables = values.get("contexts", {})
        if not set(values) <= known or not isinstance(tables, dict):
            raise ConfigError(f"{path}", sorted(values), "current, and a table [contexts.NAME] for each server")
        contexts = {name: _context(f"{path}: contexts.{name}", table) for name, table in tables.items()}
        return cls(path, contexts, values.get("current"))

    def get(self, name: str) -> Context:
        """Raises `ConfigError` for a name that the file does not have."""
        if name not in self.contexts:
            there = ", ".join(sorted(self.contexts)) or "none yet; `kvstow context set` makes one"
            raise ConfigError("context", name, there)
        return self.contexts[name]

    def write(self) -> None:
        """Replace the file as a whole. Raises `ConfigError` where that fails."""
        lines = [f"current = {json.dumps(self.current)}"] if self.current else []
        for name, context in self.contexts.items():
            lines += ["", f"[contexts.{name}]"]
            # A JSON string of characters as they are is a TOML string, too.
            lines += [
                f"{key} = {json.dumps(text, ensure_ascii=False)}" for key, text in asdict(context).items() if text
            ]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False, encoding="utf-8") as new:
                new.write("\n".join(lines) + "\n")
            os.replace(new.name, self.path)
        except OSError as error:
            raise ConfigError(CONTEXTS, str(self.path), f"a file that can be written ({error.strerror})") from error


def check_name(name: str) -> str:
    """`name`, if it can be a context's. Raises `ConfigError`."""
    if not name or not all(char.isascii() and (char.isalnum() or char in "-_") for char in name):
        raise ConfigError("context", name, _NAMES)
    return name


def _path(environ: Mapping[str, str]) -> Path:
    if environ.get(CONTEXTS):
        return Path(environ[CONTEXTS])
    home = environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "/")) / ".config"
    return Path(home) / "kvstow" / "contexts.toml"


def _context(where: str, table: Any) -> Context:
    known = [one.name for one in fields(Context)]
    given = table if isinstance(table, dict) else {}
    if "server" not in given or not set(given) <= set(known) or not all(isinstance(one, str) for one in given.values()):
        raise ConfigError(where, table, f"texts named {', '.join(known)}; a server at least")
    return Context(**given)
