"""As much of a Kubernetes API server as helm needs: it stores objects, and refuses to change what never changes."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

KINDS = {
    "v1": ("ConfigMap", "Secret", "Service", "Pod"),
    "apps/v1": ("Deployment", "DaemonSet"),
    "policy/v1": ("PodDisruptionBudget",),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "monitoring.coreos.com/v1": ("PodMonitor", "PrometheusRule"),
}
NAMESPACE = "kv"
BINARY = b"k8s\0"
"""With which Kubernetes' protocol buffers begin, in which helm writes its record of a release: a Secret."""

Object = dict[str, Any]
Answer = tuple[int, Object]


class Cluster:
    """Objects of one namespace by kind and name. Use `serving`."""

    def __init__(self, *, has_operator: bool) -> None:
        groups = {group: kinds for group, kinds in KINDS.items() if has_operator or "coreos" not in group}
        self.objects: dict[tuple[str, str], Object] = {}
        self._discovery = discovery_of(groups)
        self._kinds = {plural(kind): kind for kinds in groups.values() for kind in kinds}

    def put(self, one: Object) -> None:
        self.objects[one["kind"], one["metadata"]["name"]] = one

    def answer(self, method: str, target: str, body: bytes) -> Answer:
        url = urlsplit(target)
        if url.path in self._discovery:
            return 200, self._discovery[url.path]
        _, _, rest = url.path.partition(f"/namespaces/{NAMESPACE}/")
        resource, _, name = rest.partition("/")
        if resource not in self._kinds:
            return failure(404, "NotFound", f"no resource at {url.path}")
        kind = self._kinds[resource]
        if method == "GET":
            return self._get(kind, name, parse_qs(url.query).get("labelSelector", [""])[0])
        if method == "DELETE":
            found = self.objects.pop((kind, name), None)
            return failure(404, "NotFound", name) if found is None else (200, {"kind": "Status", "status": "Success"})
        is_binary = body.startswith(BINARY)
        return self._write(method, kind, name, secret_in(body) if is_binary else yaml.safe_load(body))

    def _get(self, kind: str, name: str, selector: str) -> Answer:
        if name:
            found = self.objects.get((kind, name))
            return failure(404, "NotFound", f"{kind} {name} not found") if found is None else (200, found)
        wanted = dict(pair.split("=", 1) for pair in selector.split(",") if pair)
        items = [
            one
            for (of_kind, _), one in self.objects.items()
            if of_kind == kind and wanted.items() <= one["metadata"].get("labels", {}).items()
        ]
        return 200, {"kind": f"{kind}List", "apiVersion": "v1", "metadata": {}, "items": items}

    def _write(self, method: str, kind: str, name: str, one: Object) -> Answer:
        """POST, PUT, or PATCH as server-side apply by the only one who ever writes."""
        name = name or one["metadata"]["name"]
        before = self.objects.get((kind, name))
        if method == "POST" and before is not None:
            return failure(409, "AlreadyExists", f"{kind} {name} already exists")
        if before is not None and kind in KINDS["apps/v1"] and before["spec"]["selector"] != one["spec"]["selector"]:
            return failure(422, "Invalid", f"{kind} {name}: spec.selector: field is immutable")
        one["metadata"] = {"namespace": NAMESPACE, "uid": f"{kind}-{name}", "resourceVersion": "1", **one["metadata"]}
        self.put(one)
        return (200 if before is not None else 201), one


def fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Those of a protocol buffer that have bytes; numbers are left out."""
    position = 0

    def number() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(message):
        key = number()
        length = number()
        if key & 7 == 2:
            yield key >> 3, message[position : position + length]
            position += length


def secret_in(body: bytes) -> Object:
    (raw,) = (value for field, value in fields(body.removeprefix(BINARY)) if field == 2)
    metadata: Object = {"labels": {}}
    secret: Object = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": {}}
    for field, value in fields(raw):
        if field == 1:
            for inner, part in fields(value):
                if inner == 1:
                    metadata["name"] = part.decode()
                elif inner == 11:
                    pair = dict(fields(part))
                    metadata["labels"][pair[1].decode()] = pair[2].decode()
        elif field == 2:
            pair = dict(fields(value))
            secret["data"][pair[1].decode()] = base64.b64encode(pair[2]).decode()
        elif field == 3:
            secret["type"] = value.decode()
    return secret


def plural(kind: str) -> str:
    return "networkpolicies" if kind == "NetworkPolicy" else f"{kind.lower()}s"


def discovery_of(groups: dict[str, tuple[str, ...]]) -> dict[str, Object]:
    """What a client is told about the API, by path."""
    named = [group.split("/") for group in groups if "/" in group]
    listed = [
        {
            "name": name,
            "versions": [{"groupVersion": f"{name}/{version}", "version": version}],
            "preferredVersion": {"groupVersion": f"{name}/{version}", "version": version},
        }
        for name, version in named
    ]
    resources = {
        f"/apis/{group}" if "/" in group else f"/api/{group}": {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": group,
            "resources": [
                {
                    "name": plural(kind),
                    "singularName": kind.lower(),
                    "namespaced": True,
                    "kind": kind,
                    "verbs": ["create", "delete", "get", "list", "patch", "update"],
                }
                for kind in kinds
            ],
        }
        for group, kinds in groups.items()
    }
    return {
        "/version": {"major": "1", "minor": "33", "gitVersion": "v1.33.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed},
        **resources,
    }


def failure(status: int, reason: str, message: str) -> Answer:
    answer = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status}
    return status, {**answer, "reason": reason, "message": message}


@contextmanager
def serving(cluster: Cluster) -> Iterator[str]:
    """The address of an API server for it."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, answer = cluster.answer(self.command, self.path, body)
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: helm says what it misses."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
