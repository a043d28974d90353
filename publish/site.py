"""`make docs`: make a site of the documents in build/site, with mkdocs and its theme Material. A warning is an error,
and so is a link that leads nowhere.

The documents stay as they are: a copy of them lies in build/documents, in the same folders, so that their links between
each other are those of the site. What they link to and is no document is copied too."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import yaml

from publish.release import public_address

ROOT = Path(__file__).parents[1]
SETTINGS = ROOT / "mkdocs.yml"
SITE = ROOT / "build" / "site"
SOURCE = ROOT / "build" / "documents"

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
_TARGET = re.compile(r"\]\(([^)#\s]+)|(?:src|srcset)=\"([^\"]+)\"")
_FENCE = re.compile(r"^ *```")


class Dead(NamedTuple):
    """A link of a page that leads nowhere."""

    page: str
    link: str


class _Settings(yaml.SafeLoader):
    """Reads mkdocs.yml; values that only mkdocs understands become None."""


_Settings.add_multi_constructor("", lambda loader, suffix, node: None)


def navigation() -> list[Any]:
    """Of the site, as mkdocs.yml has it."""
    return list(yaml.load(SETTINGS.read_text(), _Settings)["nav"])


def documents(nav: list[Any]) -> Iterator[str]:
    """The documents that the site's navigation names, in its order."""
    for entry in nav:
        (target,) = entry.values() if isinstance(entry, dict) else (entry,)
        if isinstance(target, list):
            yield from documents(target)
        else:
            yield target


def linked(text: str) -> set[str]:
    """What a document links to or shows, and is in the tree."""
    found = {one or other for one, other in _TARGET.findall(text)}
    return {target for target in found if "://" not in target and not target.startswith("mailto:")}


def for_the_site(text: str, folder: Path) -> str:
    """A document as mkdocs needs it. Links to folders become names, as a site has no page of them. A list after a
    paragraph gets an empty line before it, without which Python-Markdown sees no list."""

    def without_folders(match: re.Match[str]) -> str:
        return match[1] if "://" not in match[2] and (folder / match[2]).is_dir() else match[0]

    lines: list[str] = []
    is_code = False
    for line in _LINK.sub(without_folders, text).splitlines():
        is_code ^= bool(_FENCE.match(line))
        starts_list = re.match(r"(?:- |\d+\. )", line)
        if starts_list and not is_code and lines and re.match(r"[^\s|#-]", lines[-1]) and not _is_item(lines):
            lines.append("")
        lines.append(line)
    return "\n".join(lines) + "\n"


def _is_item(lines: list[str]) -> bool:
    """Whether the last line belongs to an item of a list, which a line without an indent may continue."""
    for line in reversed(lines):
        if not line:
            return False
        if re.match(r"\s*(?:- |\d+\. )", line):
            return True
    return False


def copy(root: Path, target: Path, nav: list[Any]) -> None:
    """Fill `target` with the documents and with what they link to."""
    shutil.rmtree(target, ignore_errors=True)
    named = list(documents(nav))
    for name in named:
        path = root / name
        text = path.read_text()
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text(for_the_site(text, path.parent))
        for link in linked(text):
            found = (path.parent / link).resolve()
            inside = found.relative_to(root)
            if found.is_file() and str(inside) not in named:
                (target / inside).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(found, target / inside)


class _Page(HTMLParser):
    """Links and anchors of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name in ("href", "src", "srcset"):
                self.links.add(value)
            elif value and name in ("id", "name"):
                self.anchors.add(value)


def dead_links(site: Path) -> list[Dead]:
    """Links within the site, HTML of the documents themselves included, whose file or anchor is not there."""
    pages = {}
    for path in site.rglob("*.html"):
        pages[path] = page = _Page()
        page.feed(path.read_text())
    found = []
    for path, page in pages.items():
        if path.name == "404.html":  # its links are absolute: it is shown at any address
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or (
                parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors
            ):
                found.append(Dead(str(path.relative_to(site)), link))
    return sorted(found)


def main() -> int:
    copy(ROOT, SOURCE, navigation())
    address = {"KVSTOW_REPOSITORY": found} if (found := public_address(ROOT)) else {}
    command = (sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", SETTINGS)
    made = subprocess.run(command, env={**os.environ, "NO_MKDOCS_2_WARNING": "1", **address}, check=False)
    if made.returncode:
        return made.returncode
    dead = dead_links(SITE)
    print("\n".join([f"{page}: {link} leads nowhere" for page, link in dead]) or f"the site is in {SITE}")
    return 1 if dead else 0


if __name__ == "__main__":
    sys.exit(main())
