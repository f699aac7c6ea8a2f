"""An API server of a few kinds for the real kubectl: ``with api_server(folder) as server``, and settings for it.

It keeps objects in memory, and nothing acts on them. ``server.objects`` are those there are.
"""

from __future__ import annotations

import json
import re
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

JOBSET = "jobset.x-k8s.io/v1alpha2"
KINDS = {
    "/api/v1": {"configmaps": "ConfigMap", "pods": "Pod", "pods/log": "Pod", "namespaces": "Namespace"},
    f"/apis/{JOBSET}": {"jobsets": "JobSet"},
}
OBJECT = re.compile(r"(/api/v1|/apis/[^/]+/[^/]+)/namespaces/([^/]+)/([^/]+)(?:/([^/]+))?(/log)?")
VERBS = ["get", "list", "create", "delete", "patch", "update", "watch"]


class ApiServer(ThreadingHTTPServer):
    """``objects``: by namespace, plural and name. ``namespace``: of the settings."""

    daemon_threads = True
    namespace = "vision"

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}

    def settings(self) -> dict[str, Any]:
        """What a kubeconfig holds."""
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{self.server_address[1]}"}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "", "namespace": self.namespace}}],
            "current-context": "here",
        }


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    server: ApiServer

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def respond(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        if (told := described(url.path)) is not None:
            self.say(told)
        elif found := OBJECT.fullmatch(url.path):
            self.serve(found, parse_qs(url.query), body)
        else:
            self.refuse("the server could not find the requested resource")

    do_GET = do_POST = do_PATCH = do_DELETE = respond  # noqa: N815

    def serve(self, found: re.Match[str], query: dict[str, list[str]], body: bytes) -> None:
        """Do what is asked of objects."""
        group, namespace, plural, name, log = found.groups()
        objects, key = self.server.objects, (namespace, plural, name)
        if self.command == "POST":
            made = json.loads(body)
            made["metadata"].update(uid=str(uuid.uuid4()), namespace=namespace, resourceVersion="1")
            if "dryRun" not in query:
                objects[namespace, plural, made["metadata"]["name"]] = made
            self.say(made)
        elif not name:
            wanted = dict(one.split("=") for one in query.get("labelSelector", [""])[0].split(",") if one)
            there = [one for where, one in objects.items() if where[:2] == (namespace, plural)]
            items = [one for one in there if wanted.items() <= one["metadata"].get("labels", {}).items()]
            version = group.removeprefix("/apis/").removeprefix("/api/")
            self.say({"kind": f"{KINDS[group][plural]}List", "apiVersion": version, "metadata": {}, "items": items})
        elif key not in objects:
            self.refuse(f'{plural} "{name}" not found')
        elif log:
            self.say(objects[key].get("log", ""))
        else:
            self.say(objects.pop(key) if self.command == "DELETE" else objects[key])

    def say(self, told: dict[str, Any] | str, code: int = 200) -> None:
        data = told.encode() if isinstance(told, str) else json.dumps(told).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/octet-stream" if isinstance(told, str) else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def refuse(self, message: str) -> None:
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        self.say({**status, "message": message}, 404)


def described(path: str) -> dict[str, Any] | str | None:
    """What the server says of itself; ``None`` where it is asked for something else."""
    if path == "/version":
        return {"major": "1", "minor": "32", "gitVersion": "v1.32.4"}
    if path == "/openapi/v2":
        return ""  # an empty document of protobuf: nothing is known of any kind, and nothing is held against it
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        version = {"groupVersion": JOBSET, "version": JOBSET.partition("/")[2]}
        group = {"name": JOBSET.partition("/")[0], "versions": [version], "preferredVersion": version}
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]}
    if path in KINDS:
        resources = [
            {"name": plural, "singularName": "", "namespaced": plural != "namespaces", "kind": kind, "verbs": VERBS}
            for plural, kind in KINDS[path].items()
        ]
        version = path.removeprefix("/apis/").removeprefix("/api/")
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}
    return None


@contextmanager
def api_server(folder: Path) -> Iterator[ApiServer]:
    """A server, and ``folder/config`` that leads to it."""
    with ApiServer() as server:
        (folder / "config").write_text(json.dumps(server.settings()))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
