"""A Hugging Face hub on loopback: the routes that huggingface_hub asks, and repositories that misbehave."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

FILE = "delta.safetensors"


@dataclass(slots=True)
class Repository:
    """A repository of the hub: its commits, the newest last, each with its files.

    Attributes:
        token: without which it is not shown; None shows it to all.
        status: of every reply, instead of 200.
    """

    commits: dict[str, dict[str, bytes]]
    token: str | None = None
    status: int | None = None


def commit(content: bytes, name: str = FILE) -> dict[str, dict[str, bytes]]:
    """Return one commit with one file, named by its content."""
    return commit_of({name: content, "README.md": b"# A delta"})


def commit_of(files: Mapping[str, bytes]) -> dict[str, dict[str, bytes]]:
    """Return one commit with these files, named by their contents."""
    return {hashlib.sha1(b"".join(files.values())).hexdigest(): dict(files)}


class Hub:
    """Repositories by name, and the requests that have come."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.repositories: dict[str, Repository] = {}
        self.requests: list[tuple[str, str]] = []
        self.headers: list[dict[str, str]] = []

    def add(self, name: str, content: bytes, **behaviour: Any) -> Repository:
        """Add the repository `acme/NAME` with one file."""
        added = self.repositories[f"acme/{name}"] = Repository(commit(content), **behaviour)
        return added

    def add_directory(self, name: str, directory: Path) -> str:
        """Add the repository `acme/NAME` with the files of a directory, and return its id."""
        files = {path.name: path.read_bytes() for path in directory.iterdir()}
        self.repositories[f"acme/{name}"] = Repository(commit_of(files))
        return f"acme/{name}"

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


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        path = urlsplit(self.path).path
        hub.requests.append((self.command, path))
        hub.headers.append(dict(self.headers))
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"] and parts[4] == "tree":
            self._tree(hub.repositories["/".join(parts[2:4])], unquote(parts[5]))
        elif parts[:2] == ["api", "models"]:
            self._info(hub.repositories.get("/".join(parts[2:4])), unquote(parts[5]))
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
        found = {"main": newest}.get(revision, revision)
        if found not in repository.commits:
            self._send(404, {"X-Error-Code": "RevisionNotFound"})
            return
        siblings = [{"rfilename": name} for name in repository.commits[found]]
        self._send(200, {}, json.dumps({"id": "acme/x", "sha": found, "siblings": siblings}).encode())

    def _tree(self, repository: Repository, revision: str) -> None:
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
        return repository.token in (None, self.headers.get("Authorization", "").removeprefix("Bearer "))

    def _send(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            if value:
                self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
