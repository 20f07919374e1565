"""Publish an artifact on a server, and try again after failures that may pass. Knows no options.

An attempt may be repeated because the server keeps one version per digest, however often it receives the bytes.
"""

from __future__ import annotations

import base64
import json
import sys
from dataclasses import dataclass
from typing import Literal

from tenacity import RetryCallState, Retrying, stop_after_attempt, wait_exponential

from client.artifact_file import ArtifactFile
from client.errors import NoAnswer, NoServer, ServerRefused
from client.http import NO_SUCH_CALL, RemoteServer, parsed
from client.reference import path_of
from client.replies import VariantReply, VersionReply
from deltastore.progress import byte_progress

MAX_ATTEMPTS = 8
# Between two attempts, in seconds; doubled each time.
FIRST_WAIT_S, MAX_WAIT_S = 1.0, 30.0
# A server that asks for more time is not waited for.
MAX_RETRY_AFTER_S = 120
# A server answers when it has checked the artifact, which takes minutes for the largest.
ANSWER_S = 900.0
# Statuses of failures that may pass; 507, a full disk, is none. A limit passes if the server says when.
TEMPORARY, LIMITED = (408, 500, 502, 503, 504), 429
NOT_FOUND, NOT_MODIFIED, QUARANTINED = 404, 304, 424


@dataclass(frozen=True, slots=True)
class Publishing:
    """An artifact, and the variant whose next version it becomes."""

    artifact: ArtifactFile
    name: str
    activate: bool
    # None leaves it as it is; a new variant is private.
    visibility: Literal["private", "public"] | None = None


def publish(server: RemoteServer, publishing: Publishing, progress: bool) -> bytes:
    """Publish an artifact, in up to `MAX_ATTEMPTS` attempts; return the server's answer.

    Args:
        server: The server; it must wait `ANSWER_S` for an answer.
        publishing: The artifact and its variant.
        progress: Show the bytes that were sent on stderr. Attempts that failed are told in any case.

    Raises:
        NoAnswer, ServerRefused: The last attempt failed, or one failed for a reason that does not pass.
        ArtifactError: The file has changed since it was hashed.
    """
    attempts = Retrying(
        stop=stop_after_attempt(MAX_ATTEMPTS),
        retry=_may_pass,
        wait=_wait_s,
        before_sleep=_tell,
        reraise=True,
    )
    return attempts(_attempt, server, publishing, progress)


def _attempt(server: RemoteServer, publishing: Publishing, progress: bool) -> bytes:
    # The attempt before may have been published although its answer was lost.
    known = _known_version(server, publishing)
    if known is None:
        return _send(server, publishing, progress)
    variant, version = known
    if publishing.visibility not in (None, variant.visibility):
        server.call("PATCH", path_of(publishing.name), body={"visibility": publishing.visibility})
    reply = {
        "name": publishing.name,
        "version": version.version,
        "digest": version.digest,
        "size_bytes": version.size_bytes,
        "active": version.version == variant.active,
    }
    return json.dumps(reply).encode()


def _known_version(server: RemoteServer, publishing: Publishing) -> tuple[VariantReply, VersionReply] | None:
    """Return the variant and its version that has these bytes; None if they must be sent."""
    path, digest = path_of(publishing.name), publishing.artifact.digest
    try:
        variant = parsed(server.call("GET", path), VariantReply)
        found = next((each for each in reversed(variant.versions) if each.digest == digest), None)
        if found is None:
            return None
        # A corrupt object is refused here, and sending its bytes again mends it. No answer has more than one byte.
        headers = {"If-None-Match": f'"{digest}"', "Range": "bytes=0-0"}
        params = {"version": str(found.version)}
        reply = server.send("GET", f"{path}/artifact", params=params, headers=headers)
    except ServerRefused as error:
        if error.status in (NOT_FOUND, QUARANTINED) and error.code != NO_SUCH_CALL:
            return None
        raise
    return (variant, found) if reply.status_code == NOT_MODIFIED else None


def _send(server: RemoteServer, publishing: Publishing, progress: bool) -> bytes:
    artifact = publishing.artifact
    headers = {
        "Content-Type": "application/octet-stream",
        "Content-Length": str(artifact.size_bytes),
        "Content-Digest": f"sha-256=:{base64.b64encode(artifact.sha256).decode()}:",
    }
    params = {"name": publishing.name, "activate": "true" if publishing.activate else "false"}
    if publishing.visibility is not None:
        params["visibility"] = publishing.visibility
    with byte_progress(artifact.size_bytes, f"sending {artifact.path.name}", progress) as bar:
        body = artifact.blocks(bar.update)
        return server.send("POST", "/variants", params=params, headers=headers, content=body).content


def _may_pass(state: RetryCallState) -> bool:
    """True if another attempt may succeed where the last one has failed."""
    error = _error_of(state)
    if isinstance(error, NoServer):
        # A server that never answered is more likely a wrong address than one that restarts.
        return state.attempt_number > 1
    if isinstance(error, ServerRefused):
        if error.retry_after_s is None:
            return error.status in TEMPORARY
        return error.status in (*TEMPORARY, LIMITED) and error.retry_after_s <= MAX_RETRY_AFTER_S
    return isinstance(error, NoAnswer)


def _wait_s(state: RetryCallState) -> float:
    """Return the seconds that the server asks for, else more after each attempt."""
    error = _error_of(state)
    if isinstance(error, ServerRefused) and error.retry_after_s is not None:
        return error.retry_after_s
    return wait_exponential(FIRST_WAIT_S, MAX_WAIT_S)(state)


def _tell(state: RetryCallState) -> None:
    print(
        f"attempt {state.attempt_number} of {MAX_ATTEMPTS} failed: {_error_of(state)}; "
        f"the next begins in {state.upcoming_sleep:.0f} s",
        file=sys.stderr,
    )


def _error_of(state: RetryCallState) -> BaseException | None:
    return None if state.outcome is None else state.outcome.exception()
