"""Digests of base images, from a registry that, as Docker Hub does, wants a token and gives one to everybody."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import parse_qs, urlsplit

import pytest
from publish import bases
from publish.bases import KINDS, Image, digest, pinned

DIGEST = f"sha256:{'a1' * 32}"


class _Registry(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        asked = parse_qs(urlsplit(self.path).query)
        body = json.dumps({"token": f"for {asked['scope'][0]}"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_HEAD(self) -> None:
        scope = "repository:library/python:pull"
        if self.headers.get("Authorization") != f"Bearer for {scope}":
            place = f"http://{self.headers['Host']}/token"
            self.send_response(401)
            self.send_header("WWW-Authenticate", f'Bearer realm="{place}",service="registry",scope="{scope}"')
        elif self.path != "/v2/library/python/manifests/3.12" or KINDS[0] not in self.headers["Accept"]:
            self.send_response(404)
        else:
            self.send_response(200)
            self.send_header("Docker-Content-Digest", DIGEST)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    registry = ThreadingHTTPServer(("127.0.0.1", 0), _Registry)
    thread = Thread(target=registry.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{registry.server_port}"
    registry.shutdown()
    thread.join()
    registry.server_close()


def test_the_registry_is_asked_with_the_token_that_it_gives(server: str) -> None:
    assert digest(Image(server, "library/python", "3.12")) == DIGEST


def test_a_tag_that_is_not_there_is_an_error(server: str) -> None:
    with pytest.raises(OSError, match="404"):
        digest(Image(server, "library/python", "2.7"))


def test_docker_hub_answers_elsewhere() -> None:
    assert Image.of("docker.io/library/python:3.12") == Image("https://registry-1.docker.io", "library/python", "3.12")
    with pytest.raises(ValueError, match="HOST/NAME:TAG"):
        Image.of("python")


def test_each_base_gets_the_digest_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bases, "digest", lambda image: DIGEST)
    old = f"@sha256:{'0' * 64}"
    assert pinned(f"ARG A_IMAGE=h.io/a:1\nARG TIERS=\nARG B_IMAGE=h.io/b:2{old}\nFROM ${{A_IMAGE}}\n") == (
        f"ARG A_IMAGE=h.io/a:1@{DIGEST}\nARG TIERS=\nARG B_IMAGE=h.io/b:2@{DIGEST}\nFROM ${{A_IMAGE}}\n"
    )
