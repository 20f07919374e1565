"""A Hugging Face hub on loopback: the routes that huggingface_hub asks, and repositories that misbehave.

Uploads go the way of LFS: content by its digest first, then a commit that names it. Xet is not spoken.
"""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

FILE = "delta.safetensors"


@dataclass(slots=True)
class Repository:
    """A repository of the hub: its commits, the newest last, each with its files.

    Attributes:
        token: without which it is not shown; None shows it to all.
        status: of every reply, instead of 200.
        writer: the token that may write to it; others are answered 403.
        num_cuts: uploads of content that are cut off in the middle, before one is let through.
        failing: status of a request by the last word of its route, such as `commit`.
        names: of branches and tags, each with its commit; `main` is the newest.
    """

    commits: dict[str, dict[str, bytes]]
    token: str | None = None
    status: int | None = None
    writer: str | None = None
    num_cuts: int = 0
    failing: dict[str, int] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    @property
    def files(self) -> dict[str, bytes]:
        """Files of the newest commit."""
        return self.commits[list(self.commits)[-1]]


def commit(content: bytes, name: str = FILE) -> dict[str, dict[str, bytes]]:
    """Return one commit with one file, named by its content."""
    return commit_of({name: content, "README.md": b"# A delta"})


def commit_of(files: Mapping[str, bytes]) -> dict[str, dict[str, bytes]]:
    """Return one commit with these files, named by their contents."""
    return {hashlib.sha1(b"".join(files.values())).hexdigest(): dict(files)}


def files_in(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


class Hub:
    """Repositories by name, and the requests that have come."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.repositories: dict[str, Repository] = {}
        self.requests: list[tuple[str, str]] = []
        self.headers: list[dict[str, str]] = []
        # Tokens that it knows; with none, tokens are not looked at.
        self.known: set[str] = set()
        self.content: dict[str, bytes] = {}

    def add(self, name: str, content: bytes, **behaviour: Any) -> Repository:
        """Add the repository `acme/NAME` with one file."""
        added = self.repositories[f"acme/{name}"] = Repository(commit(content), **behaviour)
        return added

    def add_directory(self, name: str, directory: Path) -> str:
        """Add the repository `acme/NAME` with the files of a directory, and return its id."""
        self.repositories[f"acme/{name}"] = Repository(commit_of(files_in(directory)))
        return f"acme/{name}"

    def add_commit(self, name: str, directory: Path, *names: str) -> str:
        """Add a commit with the files of a directory, and names of it; return the commit."""
        added = commit_of(files_in(directory))
        (commit,) = added
        repository = self.repositories[f"acme/{name}"]
        repository.commits.update(added)
        repository.names.update(dict.fromkeys(names, commit))
        return commit

    def fetched(self) -> set[str]:
        """Return the names of the files that were downloaded, not only asked about."""
        paths = [path for method, path in self.requests if method == "GET" and "/resolve/" in path]
        return {path.rpartition("/")[2] for path in paths}


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Run a hub on a free port of loopback."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    hub = server.hub = Hub(f"http://127.0.0.1:{server.server_port}")  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def asked_hub(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[Hub]:
    """Run a hub that huggingface_hub asks in this process, and give it a cache."""
    with running_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        yield hub


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._take(self._body())

    def do_PUT(self) -> None:
        self._take_content()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        path = urlsplit(self.path).path
        hub.requests.append((self.command, path))
        hub.headers.append(dict(self.headers))
        parts = path.strip("/").split("/")
        if hub.known and self._token() not in (*hub.known, ""):
            self._refuse_token()
            return
        if parts[:2] == ["api", "models"] and parts[4:5] == ["tree"]:
            self._tree(hub.repositories["/".join(parts[2:4])], unquote(parts[5]))
        elif parts[:2] == ["api", "models"]:
            revision = unquote(parts[5]) if len(parts) > 4 else "main"
            self._info(hub.repositories.get("/".join(parts[2:4])), revision)
        elif parts[2:3] == ["resolve"]:
            self._file(hub.repositories["/".join(parts[:2])], parts[3], unquote("/".join(parts[4:])))
        else:
            self._send(404, {})

    def _info(self, repository: Repository | None, revision: str) -> None:
        if repository is None or not self._shows(repository):
            self._send(401, {"X-Error-Code": "RepoNotFound"})
            return
        if repository.status is not None:
            self._send(repository.status, {})
            return
        newest = list(repository.commits)[-1]
        found = {"main": newest, **repository.names}.get(revision, revision)
        if found not in repository.commits:
            self._send(404, {"X-Error-Code": "RevisionNotFound"})
            return
        siblings = [{"rfilename": name} for name in repository.commits[found]]
        self._send(200, {}, json.dumps({"id": "acme/x", "sha": found, "siblings": siblings}).encode())

    def _tree(self, repository: Repository, revision: str) -> None:
        if revision not in repository.commits:
            self._send(404, {"X-Error-Code": "RevisionNotFound"})
            return
        entries = [
            {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for name, content in repository.commits[revision].items()
        ]
        self._send(200, {"Content-Type": "application/json"}, json.dumps(entries).encode())

    def _file(self, repository: Repository, revision: str, file: str) -> None:
        content = repository.commits.get(revision, {}).get(file)
        if content is None:
            self._send(404, {"X-Error-Code": "EntryNotFound"})
            return
        etag = hashlib.sha256(content).hexdigest()
        self._send(200, {"X-Repo-Commit": revision, "ETag": f'"{etag}"'}, content)

    def _shows(self, repository: Repository) -> bool:
        return repository.token in (None, self._token())

    def _token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _refuse_token(self) -> None:
        self._send_json(401, {"error": "Invalid credentials"}, {
            "X-Error-Message": "Invalid credentials in Authorization header"
        })  # fmt: skip

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _take(self, body: bytes) -> None:
        """Answer the calls of an upload but those that carry content."""
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        path = urlsplit(self.path).path
        hub.requests.append((self.command, path))
        hub.headers.append(dict(self.headers))
        parts = path.strip("/").removeprefix("api/models/").split("/")
        if self._token() not in hub.known:
            self._refuse_token()
        elif path == "/api/validate-yaml":
            self._send_json(200, {"warnings": [], "errors": []})
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif (repository := hub.repositories.get("/".join(parts[:2]).removesuffix(".git"))) is None:
            self._send_json(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        elif parts[-1] in repository.failing or parts[2] in repository.failing:
            status = repository.failing.get(parts[-1]) or repository.failing[parts[2]]
            self._send_json(status, {"error": "it fails"}, {"Retry-After": "0"})
        elif self._token() != repository.writer:
            self._send_json(403, {"error": "Forbidden"}, {"X-Error-Message": "no write access"})
        elif parts[2] == "preupload":
            files = [
                {"path": name, "uploadMode": "lfs" if name.endswith(".safetensors") else "regular",
                 "shouldIgnore": False}
                for name in (each["path"] for each in json.loads(body)["files"])
            ]  # fmt: skip
            self._send_json(200, {"files": files})
        elif parts[2] == "commit":
            self._commit(repository, "/".join(parts[:2]), body)
        else:
            self._send_json(200, {"transfer": "basic", "objects": self._objects(parts, json.loads(body))})

    def _create(self, wanted: dict[str, Any]) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        name = f"{wanted['organization']}/{wanted['name']}"
        if name in hub.repositories:
            self._send_json(409, {"error": "You already created this model repo", "url": f"{hub.url}/{name}"})
            return
        private = self._token() if wanted.get("visibility") == "private" or wanted.get("private") else None
        hub.repositories[name] = Repository(
            commit_of({".gitattributes": b""}), token=private, writer=self._token()
        )
        self._send_json(200, {"url": f"{hub.url}/{name}", "name": name})

    def _objects(self, parts: list[str], wanted: dict[str, Any]) -> list[dict[str, Any]]:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        repository = "/".join(parts[:2]).removesuffix(".git")
        return [
            each if each["oid"] in hub.content
            else {**each, "actions": {"upload": {"href": f"{hub.url}/content/{repository}/{each['oid']}"}}}
            for each in wanted["objects"]
        ]  # fmt: skip

    def _take_content(self) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        hub.requests.append((self.command, self.path))
        _, *name, oid = self.path.strip("/").split("/")
        repository = hub.repositories["/".join(name)]
        if repository.num_cuts:
            repository.num_cuts -= 1
            self.rfile.read(100)
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        body = self._body()
        if hashlib.sha256(body).hexdigest() != oid:
            self._send_json(400, {"error": "other content than its digest says"})
            return
        hub.content[oid] = body
        self._send(200, {})

    def _commit(self, repository: Repository, name: str, body: bytes) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        files = dict(repository.files)
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = hub.content[value["oid"]]
        repository.commits.update(commit_of(files))
        oid = list(repository.commits)[-1]
        self._send_json(200, {"commitUrl": f"{hub.url}/{name}/commit/{oid}", "commitOid": oid})

    def _send_json(self, status: int, body: object, headers: dict[str, str] | None = None) -> None:
        self._send(status, {"Content-Type": "application/json", **(headers or {})}, json.dumps(body).encode())

    def _send(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            if value:
                self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
