"""HTML of the status page. Jinja2 escapes all values."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from functools import cached_property
from importlib.resources import files

from jinja2 import Environment, PackageLoader

from kvstow_api.figures import CURVE_POINTS
from kvstow_api.page.content import Content
from kvstow_api.page.svg import bar, polylines

SECTIONS = (
    "state",
    "memory",
    "pools",
    "sessions",
    "tier",
    "ranks",
    "slots",
    "charts",
    "pending",
    "evictions",
    "events",
)
"""Sections that are updated separately. `sections.html` has a macro for each."""


class Renderer:
    """Compiles the templates when it is created, which takes tens of milliseconds: not for an event loop."""

    def __init__(self) -> None:
        environment = Environment(
            loader=PackageLoader("kvstow_api.page", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True
        )
        environment.globals.update(bar=bar, polylines=polylines, num_points=CURVE_POINTS, zip=zip)
        self._page = environment.get_template("page.html")
        self._macros = environment.get_template("sections.html").module
        self._style, self._script = _asset("page.css"), _asset("page.js")

    def sections(self, content: Content) -> dict[str, str]:
        return {name: getattr(self._macros, name)(content).strip() for name in SECTIONS}

    def document(self, host_name: str, state: str, sections: Mapping[str, str]) -> str:
        """The whole page, from the host's name, its state and the output of `sections`."""
        return self._page.render(
            host_name=host_name, state=state, sections=sections, style=self._style, script=self._script
        )

    @cached_property
    def headers(self) -> Mapping[str, str]:
        """Allow the browser to show the page, run its script, and connect to this server; nothing else."""
        policy = {
            "default-src": "'none'",
            "style-src": _digest(self._style),
            "script-src": _digest(self._script),
            "connect-src": "'self'",
            "img-src": "data:",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
        }
        text = "; ".join(f"{directive} {source}" for directive, source in policy.items())
        return {"Content-Security-Policy": text, "Referrer-Policy": "no-referrer"}


def _asset(name: str) -> str:
    """A file of this package without indentation."""
    text = files("kvstow_api.page").joinpath(name).read_text(encoding="utf-8")
    return re.sub(r"\n\s*", "\n", text).strip()


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
