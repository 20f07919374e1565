"""An S3 server in a process of its own on loopback, and its buckets."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
from obstore.store import S3Store

REGION = "us-east-1"
ACCESS_KEY, SECRET_KEY = "tests", "secret-of-tests"


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket of a running server."""

    endpoint: str
    name: str

    @property
    def url(self) -> str:
        """A registry's location in the bucket."""
        return f"s3://{self.name}/registry"

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables by which obstore finds and enters the server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": REGION,
            "AWS_ALLOW_HTTP": "true",
        }

    def store(self, prefix: str = "") -> S3Store:
        """Return a store of the bucket, with obstore's own timeouts and retries."""
        return S3Store(
            self.name,
            prefix=prefix or None,
            endpoint=self.endpoint,
            access_key_id=ACCESS_KEY,
            secret_access_key=SECRET_KEY,
            region=REGION,
            client_options={"allow_http": True},
        )


@dataclass(slots=True)
class S3Server:
    """A server that can be killed; its buckets are in its memory."""

    endpoint: str
    process: subprocess.Popen[str] = field(repr=False)

    def make_bucket(self) -> Bucket:
        """Make a bucket with a name of its own."""
        name = f"bucket-{secrets.token_hex(8)}"
        httpx.put(f"{self.endpoint}/{name}", timeout=240.0).raise_for_status()
        return Bucket(self.endpoint, name)


@contextmanager
def running_s3_server() -> Iterator[S3Server]:
    """Run a server until the end of the block."""
    command = [sys.executable, "-m", "tests.helpers.s3_program"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield S3Server(f"http://127.0.0.1:{int(process.stdout.readline())}", process)
        finally:
            process.kill()
