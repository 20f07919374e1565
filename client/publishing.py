"""Publishing an artifact of a disk or a hub: hash it, send it, and try again after failures that may pass.

An attempt may be repeated because the server keeps one version per digest, however often it receives the bytes.
"""

from __future__ import annotations

import base64
import glob
import hashlib
import logging
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from client.http import NO_SUCH_CALL, NoAnswer, ServerRefused, Transport, called, converted, parsed
from client.names import path_of
from client.replies import UploadReply, VariantReply, VersionReply
from client.waiting import ServerWait, is_unavailable, pause_s
from deltastore.console import byte_progress
from deltastore.errors import ArtifactError, UsageError
from deltastore.format.header import check_prefix

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 8
# After an attempt that failed, a server that asks for more time is not waited for.
MAX_RETRY_AFTER_S = 120
# A server answers when it has checked the artifact, which takes minutes for the largest.
ANSWER_S = 900.0
# Statuses of failures that may pass, beside 503; 507, a full disk, is none. A limit passes if the server says when.
TEMPORARY, LIMITED = (408, 500, 502, 504), 429
NOT_FOUND, NOT_MODIFIED, QUARANTINED = 404, 304, 424
BLOCK_BYTES = 1 << 20
HUB_SCHEME, HUB_FORM = "hf://", "hf://ORG/REPO[@REV][:FILE]"
# Files that a message names.
MAX_NAMED = 3
HUB_REFERENCE = re.compile(rf"{HUB_SCHEME}([\w.-]+/[\w.-]+)(?:@([^@:\s]+))?(?::(\S[^:]*))?")
# The bytes at the beginning of an artifact that tell it from most other files.
PREFIX_BYTES = 9


def local_file(source: str | Path, progress: bool) -> Path:
    """Return the path of an artifact, which is fetched first if it is a hub's. Raises as `fetched_from_hub` does."""
    is_of_hub = isinstance(source, str) and source.startswith(HUB_SCHEME)
    file = fetched_from_hub(str(source), progress) if is_of_hub else Path(source)
    check_is_file(file)
    return file


def fetched_from_hub(source: str, progress: bool) -> Path:
    """Return the path of a hub's artifact in huggingface_hub's cache, fetched with the user's own token if need be.

    Args:
        source: ``hf://ORG/REPO[@REV][:FILE]``; by default the newest commit, and the repository's only artifact.
        progress: Show the download on stderr.

    Raises:
        UsageError: `source` has another form, or names no single artifact of its repository.
        ArtifactError: The hub does not give it.
    """
    # Deferred: it takes longer than all else that `peraxis push` imports.
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.utils.logging import set_verbosity_error
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if (reference := HUB_REFERENCE.fullmatch(source)) is None:
        raise UsageError(f"{source} names no file of a hub: give {HUB_FORM}")
    repo, revision, file = reference.groups()
    pattern = "*.safetensors" if file is None else glob.escape(file)
    was_disabled = are_progress_bars_disabled()
    # It would warn of what the errors here say.
    set_verbosity_error()  # type: ignore[no-untyped-call]
    # The list of files has a bar of its own, which says nothing.
    disable_progress_bars()
    try:
        found = snapshot_download(repo, revision=revision, allow_patterns=pattern, dry_run=True)
        if not found:
            raise UsageError(f"{source}: the repository has no file {file or pattern}: give {HUB_FORM}")
        if len(found) > 1:
            names = ", ".join(sorted(each.filename for each in found)[:MAX_NAMED])
            raise UsageError(
                f"{source}: the repository has {len(found)} artifacts, such as {names}: give {HUB_FORM}"
            )
        if progress and sys.stderr.isatty() and not was_disabled:
            enable_progress_bars()
        return Path(hf_hub_download(repo, found[0].filename, revision=found[0].commit_hash))
    except (OSError, ValueError) as error:
        lines = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
        raise ArtifactError(
            f"{source}: the hub does not give it ({lines[0]}): check the name, as {HUB_FORM}, and the network, or run "
            "`hf auth login`"
        ) from error


def check_is_file(path: Path) -> None:
    """Raise UsageError if `path` is no regular file."""
    if not path.exists():
        raise UsageError(f"{path}: no such file: give the artifact that `peraxis compress` wrote")
    if not path.is_file():
        raise UsageError(f"{path} is no file: give the artifact that `peraxis compress` wrote")


@dataclass(frozen=True, slots=True)
class Publishing:
    """An artifact, and the variant whose next version it becomes."""

    artifact: ArtifactFile
    name: str
    activate: bool
    # None leaves it as it is; a new variant is private.
    visibility: Literal["private", "public"] | None = None


@dataclass(frozen=True, slots=True)
class ArtifactFile:
    """A file whose first bytes are an artifact's, as it was when it was hashed."""

    path: Path
    size_bytes: int
    sha256: bytes

    @classmethod
    def read(cls, path: Path, progress: Callable[[int], object]) -> ArtifactFile:
        """Hash a file.

        Args:
            path: The file.
            progress: Called with the number of bytes hashed since the last call.

        Raises:
            UsageError: It does not exist, or is no regular file.
            ArtifactError: It is no artifact.
            OSError: It cannot be read.
        """
        check_is_file(path)
        digest, num_bytes = hashlib.sha256(), 0
        for block in _blocks(path):
            if not num_bytes:
                check_prefix(block[:PREFIX_BYTES], path.stat().st_size, str(path))
            digest.update(block)
            num_bytes += len(block)
            progress(len(block))
        if not num_bytes:
            raise ArtifactError(f"{path} is empty: give the artifact that `peraxis compress` wrote")
        return cls(path, num_bytes, digest.digest())

    @property
    def digest(self) -> str:
        """The digest as the server names it: ``sha256:`` and 64 hex digits."""
        return f"sha256:{self.sha256.hex()}"

    def blocks(self, progress: Callable[[int], object]) -> Iterator[bytes]:
        """Yield the file's bytes, and call `progress` with the number of each block's once the next is asked for.

        Raises:
            ArtifactError: The file has another length than when it was hashed.
        """
        num_bytes = 0
        for block in _blocks(self.path):
            num_bytes += len(block)
            if num_bytes > self.size_bytes:
                break
            yield block
            progress(len(block))
        if num_bytes != self.size_bytes:
            raise ArtifactError(f"{self.path} changed while it was sent: push it again")


async def publish(
    transport: Transport,
    publishing: Publishing,
    progress: bool,
    waiting: ServerWait,
    tell: Callable[[str], object] = log.warning,
) -> UploadReply:
    """Publish an artifact, in up to `MAX_ATTEMPTS` attempts; return the server's answer.

    Attempts that find no server, or one that takes no calls, are not counted: `waiting` bounds them.

    Args:
        transport: The way to the server.
        publishing: The artifact and its variant.
        progress: Show the bytes that were sent on stderr.
        waiting: How long the server is waited for.
        tell: Called with a line for each attempt that failed.

    Raises:
        NoAnswer, ServerRefused: The last attempt failed, or one failed for a reason that does not pass.
        ArtifactError: The file has changed since it was hashed.
    """
    num_failed = 0
    while True:
        try:
            return await _attempt(transport, publishing, progress, waiting)
        except (NoAnswer, ServerRefused) as error:
            if is_unavailable(error):
                next_s = waiting.next_pause_s(error)
            else:
                waiting.answered()
                waiting.restart()
                num_failed += 1
                if num_failed == MAX_ATTEMPTS or not _may_pass(error):
                    raise
                next_s = pause_s(error, 2.0 ** (num_failed - 1))
                tell(
                    f"attempt {num_failed} of {MAX_ATTEMPTS} failed: {error}; the next begins in {next_s:.0f} s"
                )
        await transport.sleep(next_s)


async def _attempt(
    transport: Transport, publishing: Publishing, progress: bool, waiting: ServerWait
) -> UploadReply:
    # The attempt before may have been published although its answer was lost.
    known = await _known_version(transport, publishing)
    waiting.answered()
    if known is None:
        return await _send(transport, publishing, progress)
    variant, version = known
    if publishing.visibility not in (None, variant.visibility):
        change = {"visibility": publishing.visibility}
        await called(transport, "PATCH", path_of(publishing.name), json=change)
    reply = {
        "name": publishing.name,
        "version": version.version,
        "digest": version.digest,
        "size_bytes": version.size_bytes,
        "active": version.version == variant.active,
    }
    return converted(reply, UploadReply)


async def _known_version(
    transport: Transport, publishing: Publishing
) -> tuple[VariantReply, VersionReply] | None:
    """Return the variant and its version that has these bytes; None if they must be sent."""
    path, digest = path_of(publishing.name), publishing.artifact.digest
    try:
        variant = parsed((await called(transport, "GET", path)).content, VariantReply)
        found = next((each for each in reversed(variant.versions) if each.digest == digest), None)
        if found is None:
            return None
        # A corrupt object is refused here, and sending its bytes again mends it. No answer has more than one byte.
        headers = {"If-None-Match": f'"{digest}"', "Range": "bytes=0-0"}
        params = {"version": str(found.version)}
        reply = await called(transport, "GET", f"{path}/artifact", params=params, headers=headers)
    except ServerRefused as error:
        if error.status in (NOT_FOUND, QUARANTINED) and error.code != NO_SUCH_CALL:
            return None
        raise
    return (variant, found) if reply.status_code == NOT_MODIFIED else None


async def _send(transport: Transport, publishing: Publishing, progress: bool) -> UploadReply:
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
        sent: dict[str, Any] = {"params": params, "headers": headers, "content": body}
        reply = await called(transport, "POST", "/variants", read_s=ANSWER_S, **sent)
    return parsed(reply.content, UploadReply)


def _may_pass(error: NoAnswer | ServerRefused) -> bool:
    """True if another attempt may succeed where this one has failed."""
    if not isinstance(error, ServerRefused):
        return True
    if error.retry_after_s is None:
        return error.status in TEMPORARY
    return error.status in (*TEMPORARY, LIMITED) and error.retry_after_s <= MAX_RETRY_AFTER_S


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield block
