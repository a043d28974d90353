"""`python -m publish.bases`: ask the registries which images the tags of the Dockerfile's bases name today, and write
their digests beside the tags. A tag can move, a digest cannot."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from email.message import Message
from pathlib import Path
from typing import NamedTuple
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

DOCKERFILE = Path(__file__).parents[1] / "Dockerfile"
KINDS = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_BASE = re.compile(r"^(ARG \w+_IMAGE=)([^@\s]+)(?:@sha256:[0-9a-f]{64})?$", re.MULTILINE)
_PATIENCE_S = 30


class Image(NamedTuple):
    """A tag in a registry. `server` is the URL at which the registry answers."""

    server: str
    name: str
    tag: str

    @classmethod
    def of(cls, text: str) -> Image:
        """Of `docker.io/library/python:3.12`, as the Dockerfile has it. Raises `ValueError` without a host or tag."""
        match = re.fullmatch(r"([\w.-]+(?::\d+)?)/([\w./-]+):([\w.-]+)", text)
        if match is None:
            raise ValueError(f"{text} is not of the form HOST/NAME:TAG")
        host = "registry-1.docker.io" if match[1] == "docker.io" else match[1]
        return cls(f"https://{host}", match[2], match[3])


def digest(image: Image) -> str:
    """`sha256:...` of the index of all platforms that the tag names. Raises `OSError` if the registry gives none."""
    request = Request(f"{image.server}/v2/{image.name}/manifests/{image.tag}", method="HEAD")
    request.add_header("Accept", ", ".join(KINDS))
    try:
        found = _headers(request)
    except HTTPError as error:
        if error.code != 401:
            raise
        request.add_header("Authorization", f"Bearer {_token(error.headers)}")
        found = _headers(request)
    told = found.get("Docker-Content-Digest", "")
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", told):
        raise OSError(f"{image.server} names no digest of {image.name}:{image.tag}, but {told!r}")
    return told


def pinned(dockerfile: str) -> str:
    """The text with the digest of today behind each base."""
    return _BASE.sub(lambda match: f"{match[1]}{match[2]}@{digest(Image.of(match[2]))}", dockerfile)


def main(argv: Sequence[str] | None = None) -> int:
    (path,) = [Path(one) for one in argv or ()] or [DOCKERFILE]
    path.write_text(pinned(path.read_text()))
    print("\n".join(match[0] for match in _BASE.finditer(path.read_text())))
    return 0


def _headers(request: Request) -> Message:
    with urlopen(request, timeout=_PATIENCE_S) as answer:
        found: Message = answer.headers
        return found


def _token(headers: Message) -> str:
    """For reading, which registries give to everybody, at the place that their refusal names."""
    asked = dict(re.findall(r'(\w+)="([^"]*)"', headers.get("WWW-Authenticate", "")))
    realm = asked.pop("realm", None)
    if realm is None:
        raise OSError(f"the registry says no place for tokens: {headers.get('WWW-Authenticate')!r}")
    with urlopen(f"{realm}?{urlencode(asked)}", timeout=_PATIENCE_S) as answer:
        return str(json.load(answer)["token"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
