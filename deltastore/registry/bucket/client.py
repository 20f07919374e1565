"""One prefix of an S3-compatible bucket: its two clients and the errors that they raise. Must not know variants.

Credentials, region and endpoint come from the AWS_* variables that obstore reads.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from ipaddress import ip_address
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Self

from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store

from deltastore.errors import PeraxisError, RegistryUnavailable, StorageFull, UsageError, shown
from deltastore.registry.claims import SCHEME

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

LOCATION = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(?P<prefix>[A-Za-z0-9._/-]*))?")
# Timeout of calls for small files: with the retry, a call ends within the deadline of a request's resolution.
SMALL_TIMEOUT = timedelta(seconds=2)
SMALL_RETRY_TIMEOUT = timedelta(seconds=3)
# Timeout of calls for objects: a part of an object may be slow, but not without any byte.
READ_TIMEOUT = timedelta(seconds=20)
PART_TIMEOUT = timedelta(minutes=5)
# Error codes of S3, MinIO and Ceph for a bucket or user that may store no more bytes.
FULL = re.compile(r"QuotaExceeded|XMinioStorageFull|XMinioAdminBucketQuotaExceeded|InsufficientStorage|507 ")
GONE = "NoSuchBucket"
# The variables of an endpoint that obstore reads.
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
ENDPOINT = re.compile(
    r"https?://(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:(?P<port>[0-9]{1,5}))?(/[A-Za-z0-9._~%/-]*)?",
    re.IGNORECASE,
)
LARGEST_PORT = 65535
MAX_REASON = 300


class Bucket:
    """A prefix of a bucket. `small` has short deadlines, for small files and lists; `large` is for objects.

    Args:
        location: `s3://BUCKET/PREFIX`, for messages.
        small: A store whose keys begin below the prefix.
        large: Another client of the same keys.
    """

    def __init__(self, location: str, small: ObjectStore, large: S3Store) -> None:
        self.location = location.rstrip("/")
        self.small = small
        self.large = large
        # The beginning of all paths: messages show a key as BUCKET/PREFIX/KEY.
        self.root = PurePosixPath(self.location.removeprefix(SCHEME))
        self._was_found = False

    @classmethod
    def open(cls, location: str) -> Self:
        """Open a bucket by its location. Makes no call.

        Raises:
            UsageError: The location is malformed, or the endpoint has no TLS and that was not allowed.
        """
        found = LOCATION.fullmatch(location)
        if found is None:
            raise UsageError(
                f"{location!r} names no bucket: give --registry s3://BUCKET/PREFIX, with a bucket of 3 to 63 small "
                "letters, digits, dots and hyphens"
            )
        _check_endpoint()
        prefix = (found["prefix"] or "").strip("/") or None
        small = _store(
            found["bucket"],
            prefix,
            {"timeout": SMALL_TIMEOUT},
            {"max_retries": 1, "retry_timeout": SMALL_RETRY_TIMEOUT},
        )
        large = _store(
            found["bucket"],
            prefix,
            {"timeout": PART_TIMEOUT, "read_timeout": READ_TIMEOUT},
            {"max_retries": 3, "retry_timeout": PART_TIMEOUT},
        )
        return cls(location, small, large)

    def key(self, path: PurePosixPath) -> str:
        """Return the key of a path; "" for the root."""
        return "/".join(path.relative_to(self.root).parts)

    @contextmanager
    def calls(self) -> Iterator[None]:
        """Turn errors into RegistryUnavailable or StorageFull; FileNotFoundError passes if the bucket exists."""
        try:
            yield
            self._was_found = True
        except AlreadyExistsError:
            raise
        except FileNotFoundError as error:
            if GONE in str(error):
                raise (self.gone() if self._was_found else self._absent()) from error
            raise
        except (BaseError, ValueError) as error:
            raise self._explained(str(error)) from error

    def gone(self) -> RegistryUnavailable:
        """Return the error for a bucket or prefix that does not hold the registry any more, or never did."""
        if not self._was_found:
            return RegistryUnavailable(
                f"{self.location} is not a registry: give the location that `peraxis serve --registry` was given, or "
                "restore the bucket",
                public="the server's bucket holds no registry: ask its operator to check it",
            )
        return RegistryUnavailable(
            f"{self.location} is gone: restore the bucket, or give --registry another one",
            public="the registry's bucket is gone: ask its operator to restore it",
        )

    def _absent(self) -> RegistryUnavailable:
        return RegistryUnavailable(
            f"there is no bucket {self.root.parts[0]}: create it or restore it, or give --registry another one",
            public="the registry's bucket does not exist: ask its operator to create or restore it",
        )

    def _explained(self, text: str) -> PeraxisError:
        reason = text.partition("\n\nDebug source")[0].replace("\n", " ")[:MAX_REASON]
        if FULL.search(text):
            return StorageFull(
                f"{self.location} takes no more bytes: raise its quota, or run "
                f"`peraxis registry gc --registry {self.location}`: {reason}",
                public="the quota of the registry's bucket is used up: ask its operator to raise it, "
                "or to run `peraxis registry gc`",
            )
        return RegistryUnavailable(
            f"{self.location} did not answer as expected: {reason}: nothing was acknowledged; check the endpoint, the "
            "credentials and the rights on the bucket, then try again",
            public="the registry's bucket did not answer as expected: nothing was acknowledged; try again",
        )


def _allows_http() -> bool:
    return os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")


def _check_endpoint() -> None:
    """Refuse an endpoint that every call would fail on, with a panic of obstore or an error that names no reason."""
    for name in ENDPOINTS:
        endpoint = os.environ.get(name, "")
        if endpoint and not _is_url(endpoint):
            raise UsageError(
                f"the endpoint {shown(endpoint)} of {name} is no URL: give https://HOST or https://HOST:PORT"
            )
        if endpoint.lower().startswith("http://") and not _allows_http():
            raise UsageError(
                f"the endpoint {endpoint} of {name} has no TLS: set AWS_ALLOW_HTTP=true to send credentials and "
                "artifacts in plain text, or give an https:// endpoint"
            )


def _is_url(endpoint: str) -> bool:
    found = ENDPOINT.fullmatch(endpoint)
    if found is None or int(found["port"] or 0) > LARGEST_PORT:
        return False
    host = found["host"]
    # As URLs are read, a host whose last label is a number is an address.
    if not host.startswith("[") and not host.rpartition(".")[2].isdigit():
        return True
    try:
        ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def _store(bucket: str, prefix: str | None, deadlines: ClientConfig, retry: RetryConfig) -> S3Store:
    # obstore reads AWS_ALLOW_HTTP, too, but not beside options that are given.
    options: ClientConfig = {"allow_http": _allows_http(), "connect_timeout": SMALL_TIMEOUT, **deadlines}
    return S3Store(bucket, prefix=prefix, client_options=options, retry_config=retry)
