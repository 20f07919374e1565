"""A file on a Hugging Face hub: its name as clients give it, and its way here, in a worker that may be killed.

huggingface_hub keeps its HTTP client per process, reads replies of any size and takes as long as a hub lets it; a
worker has limits on all three. Every request, those of redirects included, goes to the configured hub. Only public
repositories are read: no token is sent, because the operator's would let tenants read what it can.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, cast
from urllib.parse import unquote, urlsplit

from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url, set_client_factory
from huggingface_hub.errors import (
    DisabledRepoError,
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.utils._headers import build_hf_headers
from huggingface_hub.utils._http import default_client_factory
from huggingface_hub.utils.tqdm import disable_progress_bars

from deltastore.errors import shown
from server.errors import InvalidRequest, SourceUnavailable
from server.publishing.directories import ARTIFACT_SUFFIX, PARAM

SCHEME = "hf://"
PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
REFERENCE = re.compile(rf"({PART}/{PART})@([^/@\s]{{1,255}})(?:/(.{{1,1024}}))?")
# Characters of a revision or a file name: no separator that changes the meaning of a URL, and nothing invisible.
NAME = re.compile(r"[^\x00-\x20\x7f\\?#%]+")


@dataclass(frozen=True, slots=True)
class HubReference:
    """A file of a repository at a revision, which may move."""

    repo: str  # ORG/REPO
    revision: str  # a branch, a tag or a commit
    file: str | None  # None: the repository's only artifact

    @classmethod
    def parse(cls, source: str) -> HubReference:
        """Parse a source that begins with `SCHEME`. A slash in the revision is written %2F, as in refs%2Fpr%2F1.

        Raises:
            InvalidRequest: it has another form.
        """
        found = REFERENCE.fullmatch(source.removeprefix(SCHEME))
        if found is not None:
            repo, revision, file = found[1], unquote(found[2]), found[3]
            if _is_path(revision) and (file is None or _is_path(file)):
                return cls(repo, revision, file)
        raise InvalidRequest(
            f"{shown(source)} names no file of a hub: send hf://ORG/REPO@REVISION or hf://ORG/REPO@REVISION/FILE",
            "source",
        )


def _is_path(text: str) -> bool:
    parts = text.split("/")
    return NAME.fullmatch(text) is not None and not {"", ".", ".."} & set(parts)


# For one reply of the hub's API.
API_S = 20.0
COMMIT = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")
DEFAULT_PORTS = {"http": 80, "https": 443}
# huggingface.co stores large files on hosts below these domains and redirects to them.
OFFICIAL_HOSTS = ("huggingface.co", "hf.co")
NOT_FOUND = (RepositoryNotFoundError, RevisionNotFoundError, EntryNotFoundError, DisabledRepoError)


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file at a commit: its bytes cannot change."""

    repo: str
    commit: str
    name: str
    url: str
    size_bytes: int | None
    sha256: str | None  # of large files, which the hub keeps by it


def find_file(reference: HubReference, hub_url: str) -> HubFile:
    """Resolve the revision to a commit, and find the file there.

    Raises:
        InvalidRequest: there is no such public repository, revision or file, or no single artifact.
        SourceUnavailable: the hub failed, or redirects elsewhere.
    """
    _ask_only(hub_url)
    with _explained(reference.repo):
        info = HfApi(hub_url, token=False).model_info(
            reference.repo, revision=reference.revision, timeout=API_S
        )
        commit = info.sha or ""
        if not COMMIT.fullmatch(commit):
            raise SourceUnavailable(f"the hub names no commit of {reference.repo}@{reference.revision}")
        name = reference.file or _only_artifact([each.rfilename for each in info.siblings or ()], reference)
        url = hf_hub_url(reference.repo, name, revision=commit, endpoint=hub_url)
        found = get_hf_file_metadata(url, token=False, timeout=API_S, endpoint=hub_url)
    if found.commit_hash not in (None, commit):
        raise SourceUnavailable(f"the hub has {found.commit_hash} where {commit} was asked for")
    sha256 = found.etag if found.etag and SHA256.fullmatch(found.etag) else None
    return HubFile(reference.repo, commit, name, found.location, found.size, sha256)


def download(file: HubFile, hub_url: str, pipe: str) -> None:
    """Write the file to a named pipe. An interrupted transfer is resumed a few times.

    Raises:
        InvalidRequest: the file does not exist any more.
        SourceUnavailable: the hub failed, redirects elsewhere, or sent less than it announced.
    """
    _ask_only(hub_url)
    disable_progress_bars()
    # A compressed reply would be decompressed without a bound.
    headers = {**build_hf_headers(token=False), "Accept-Encoding": "identity"}
    with open(pipe, "wb") as sink, _explained(file.repo):
        http_get(file.url, cast(BinaryIO, sink), headers=headers, expected_size=file.size_bytes)


def is_hub_url(url: str, hub_url: str) -> bool:
    """Return whether a URL belongs to the hub: its origin, or for huggingface.co a host below its domains."""
    if _origin(url) == _origin(hub_url):
        return True
    scheme, host, _ = _origin(url)
    is_official = _origin(hub_url) in [("https", official, 443) for official in OFFICIAL_HOSTS]
    return is_official and scheme == "https" and host.endswith(tuple(f".{each}" for each in OFFICIAL_HOSTS))


def _origin(url: str) -> tuple[str, str, int]:
    parts = urlsplit(url)
    return parts.scheme, (parts.hostname or "").lower(), parts.port or DEFAULT_PORTS.get(parts.scheme, 0)


def _ask_only(hub_url: str) -> None:
    """Make huggingface_hub refuse every request that does not go to the hub."""

    def check(request: Any) -> None:
        if not is_hub_url(str(request.url), hub_url):
            raise SourceUnavailable(
                f"the hub redirects to {request.url.host}, and only {hub_url} is asked: "
                "ask the server's operator for a hub that sends its files itself"
            )

    def make_client() -> Any:
        client = default_client_factory()
        hooks = client.event_hooks
        client.event_hooks = {**hooks, "request": [check, *hooks["request"]]}
        return client

    set_client_factory(make_client)


def _only_artifact(names: Sequence[str], reference: HubReference) -> str:
    artifacts = [name for name in names if name.endswith(ARTIFACT_SUFFIX)]
    if len(artifacts) != 1:
        raise InvalidRequest(
            f"{reference.repo} has {len(artifacts)} files *{ARTIFACT_SUFFIX} at {shown(reference.revision)}: "
            f"name one, as in hf://{reference.repo}@{reference.revision}/FILE",
            PARAM,
        )
    return artifacts[0]


@contextmanager
def _explained(repo: str) -> Iterator[None]:
    """Turn huggingface_hub's errors into ours. Those of the transport end the task and are named by its caller."""
    try:
        yield
    except (*NOT_FOUND, HFValidationError) as error:
        raise InvalidRequest(
            f"the hub has no such public file, revision or repository of {repo}: check the source", PARAM
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403, 404):
            raise InvalidRequest(
                f"the hub refuses this file of {repo} to anonymous readers: make it public", PARAM
            ) from error
        raise SourceUnavailable(f"the hub answered {status} for {repo}: try again later") from error
    except OSError as error:
        raise SourceUnavailable(f"the file of {repo} did not arrive whole: try again later") from error
