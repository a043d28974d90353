"""The status page: a static document with its style and script, which reads `/v1/overview`. The charts are uPlot's,
whose files are part of the same style and script, so that the page's policy allows only these two texts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from kvstow_api.page.policy import asset, headers

_STYLES = ("uplot/uPlot.min.css", "page.css")
_SCRIPTS = ("uplot/uPlot.iife.min.js", "charts.js", "page.js")


class StaticPage(NamedTuple):
    """The page, and the headers with which it is sent."""

    html: bytes
    headers: Mapping[str, str]


@cache
def status_page() -> StaticPage:
    style, script = ("\n".join(map(asset, names)) for names in (_STYLES, _SCRIPTS))
    html = asset("page.html").replace("{style}", style).replace("{script}", script)
    return StaticPage(html.encode(), headers(style, script))
