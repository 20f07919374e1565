"""An S3 server as a process: moto's, with atomic conditional puts and cheap range reads.

moto compares `If-None-Match` and stores the object in two steps, so that two of several threads may create one object;
puts are serialised here. It copies a whole object for each range that is read; ranges are read from its buffers here.

The process prints its port and ends when its standard input is closed, so that it cannot outlive its parent.
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterable
from typing import Any
from wsgiref.types import StartResponse, WSGIEnvironment

from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from moto.s3.models import FakeKey, s3_backends
from werkzeug.http import parse_range_header
from werkzeug.serving import make_server

# Threads are switched so often that a race in the server is seen.
SWITCH_INTERVAL_S = 1e-6


class S3Application:
    """moto's WSGI application, with changes to two kinds of requests."""

    def __init__(self) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._puts = threading.Lock()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        method = environ["REQUEST_METHOD"]
        if method == "GET" and "HTTP_RANGE" in environ and (key := _stored(environ["PATH_INFO"])) is not None:
            return _range_of(key, environ["HTTP_RANGE"], start_response)
        if method == "PUT" and not environ.get("QUERY_STRING"):
            # A client that sends slowly must not hold the lock.
            body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            environ["wsgi.input"] = io.BytesIO(body)
            with self._puts:
                return self._answer(environ, start_response)
        return self._answer(environ, start_response)

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        answer: Iterable[bytes] = self._moto(environ, start_response)
        return answer


def main() -> None:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    server = make_server("127.0.0.1", 0, S3Application(), threaded=True, request_handler=MotoRequestHandler)
    print(server.server_port, flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()


def _stored(path: str) -> FakeKey | None:
    """Return the object of /BUCKET/KEY."""
    bucket, _, name = path.removeprefix("/").partition("/")
    backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
    key: Any = backend.get_object(bucket, name) if bucket in backend.buckets else None
    return key if isinstance(key, FakeKey) else None


def _range_of(key: FakeKey, wanted: str, start_response: StartResponse) -> Iterable[bytes]:
    size = key.size
    parsed = parse_range_header(wanted)
    found = parsed.range_for_length(size) if parsed is not None else None
    if found is None:
        start_response("416 Range Not Satisfiable", [("Content-Length", "0")])
        return [b""]
    begin, end = found
    with key.lock:
        key._value_buffer.seek(begin)
        content = key._value_buffer.read(end - begin)
    headers = {
        "ETag": key.etag,
        "Last-Modified": key.last_modified_RFC1123,
        "Content-Range": f"bytes {begin}-{end - 1}/{size}",
        "Content-Length": str(len(content)),
    }
    start_response("206 Partial Content", list(headers.items()))
    return [content]


if __name__ == "__main__":
    main()
