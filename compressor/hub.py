"""Upload a delta and its model card to a repository of the Hugging Face hub: `peraxis push-hub`.

huggingface_hub sends the files and finds the token. Every failure of the hub becomes one line with a way out.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from huggingface_hub.utils.logging import get_verbosity, set_verbosity, set_verbosity_error
from huggingface_hub.utils.tqdm import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)

from compressor.model_card import CARD, MARK, DeltaFacts, model_card
from compressor.writer import DeltaFile
from deltastore.errors import PeraxisError, UsageError, failures_as, shown
from deltastore.format.artifact import Artifact
from deltastore.format.validate import check_artifact

SUFFIX = ".safetensors"
TOKENS = "https://huggingface.co/settings/tokens"
UNAUTHORISED, FORBIDDEN, NOT_FOUND, LIMITED = 401, 403, 404, 429


class HubError(PeraxisError):
    """A hub that does not take an upload."""


class HubRefused(HubError):
    """A hub that does not take this token, or none."""

    exit_code = 4


@dataclass(frozen=True, slots=True)
class HubPush:
    """Settings of one upload."""

    file: Path
    repo: str
    card: Path | None = (
        None  # the directory of the card that `compress` wrote; None makes one of the artifact
    )
    base_model: str | None = None  # a hub id
    create: bool = False
    replace_card: bool = False  # also one that is no delta's
    progress: bool = False

    def __post_init__(self) -> None:
        for argument, given in (("repo", self.repo), ("base_model", self.base_model)):
            if given is None:
                continue
            try:
                validate_repo_id(given)
            except HFValidationError as error:
                raise UsageError(
                    f"`{argument}` {shown(given)}: it is no id of a hub: give ORG/REPO"
                ) from error
            if "/" not in given:
                raise UsageError(f"`{argument}` {shown(given)}: its owner is missing: give ORG/REPO")


@dataclass(frozen=True, slots=True)
class Pushed:
    """An uploaded artifact."""

    url: str  # of the commit
    commit: str
    digest: str  # SHA-256, 64 hex digits
    size_bytes: int
    has_card: bool  # False where the repository's own README.md stayed

    def as_json(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "commit": self.commit,
            "digest": f"sha256:{self.digest}",
            "size_bytes": self.size_bytes,
            "has_card": self.has_card,
        }


def push_hub(push: HubPush) -> Pushed:
    """Upload an artifact and its card in one commit; a failure leaves the repository as it was.

    Raises:
        ArtifactError: the file is missing, or no artifact of this format.
        HubRefused: there is no token, or one that may not write to the repository.
        HubError: the repository is not there, or the upload fails.
        UsageError: a file name that servers do not look for, or a card that is not there.
    """
    delta, card = _delta_and_card(push)
    if get_token() is None:
        raise HubRefused(f"{push.repo}: there is no token: set HF_TOKEN, or run `hf auth login`")
    api = HfApi()
    with _errors_of_hub(push), _quiet(push.progress):
        if push.create:
            api.create_repo(push.repo, private=True, exist_ok=True)
        has_card = push.replace_card or _takes_card(api, push.repo)
        files = [CommitOperationAdd(push.file.name, push.file)]
        if has_card:
            files.append(CommitOperationAdd(CARD, str(card).encode()))
        commit = api.create_commit(push.repo, files, commit_message=f"Upload {push.file.name}")
    return Pushed(commit.commit_url, commit.oid, delta.digest, delta.artifact_bytes, has_card)


def _delta_and_card(push: HubPush) -> tuple[DeltaFile, ModelCard]:
    if push.file.suffix != SUFFIX:
        raise UsageError(f"`file` {push.file}: servers look for a name that ends in {SUFFIX}: rename it so")
    with Artifact.open(push.file) as artifact:
        # A server would refuse it, too.
        check_artifact(artifact)
        delta = DeltaFile(push.file, artifact.digest(), artifact.size_bytes, artifact.manifest)
    if push.card is None:
        card = model_card(DeltaFacts.of(delta, push.file.stem, ()))
    else:
        card = _written_card(push.card, delta)
    if push.base_model is not None:
        card.data["base_model"] = push.base_model
    return delta, card


def _written_card(directory: Path, delta: DeltaFile) -> ModelCard:
    path = directory / CARD
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(
            f"`card` {directory}: {path}: {reason}: give the directory of `compress --report`"
        ) from error
    if MARK not in text or delta.digest not in text:
        raise UsageError(
            f"`card` {directory}: {path} is not the card of {delta.out}: give the directory of its `compress --report`,"
            " or leave `card` away"
        )
    return ModelCard(text)


def _takes_card(api: HfApi, repo: str) -> bool:
    """Return True where the repository has no card, or one of a delta."""
    info = api.model_info(repo)
    if CARD not in {sibling.rfilename for sibling in info.siblings or ()}:
        return True
    with tempfile.TemporaryDirectory(prefix="peraxis-card-") as scratch:
        path = api.hf_hub_download(repo, CARD, revision=info.sha, local_dir=scratch)
        return MARK.encode() in Path(path).read_bytes()


@contextmanager
def _errors_of_hub(push: HubPush) -> Iterator[None]:
    """Turn every failure of huggingface_hub into one error with a way out."""
    again = "the repository is as it was: run the same command again"
    try:
        with failures_as(lambda reason: HubError(f"{push.repo}: the upload broke off ({reason}): {again}")):
            yield
    except HubError as error:
        cause = error.__cause__
        if not isinstance(cause, HfHubHTTPError) or getattr(cause, "response", None) is None:
            raise
        raise _refusal(push, cause, again) from cause


def _refusal(push: HubPush, error: HfHubHTTPError, again: str) -> HubError:
    status, repo = error.response.status_code, push.repo
    is_hidden = error.response.headers.get("X-Error-Code") == "RepoNotFound"
    if status == NOT_FOUND or (status == UNAUTHORISED and is_hidden):
        way_out = (
            "check the name and the token"
            if push.create
            else "check the name and the token, or give `create=True`"
        )
        return HubError(
            f"{repo}: the hub has no such repository that this token may see ({status}): {way_out}"
        )
    if status == UNAUTHORISED:
        return HubRefused(
            f"{repo}: the hub does not know this token ({status}): set HF_TOKEN to one of {TOKENS}, or run "
            "`hf auth login`"
        )
    if status == FORBIDDEN:
        return HubRefused(
            f"{repo}: this token may not write there ({status}): give it the right to at {TOKENS}, or push to a "
            "repository of its owner"
        )
    if status == LIMITED:
        wait = error.response.headers.get("Retry-After")
        when = f"in {shown(wait)} s" if wait else "in some minutes"
        return HubError(
            f"{repo}: the hub limits requests of this token ({status}): run the same command again {when}"
        )
    reason = " ".join((error.server_message or str(error)).split())[:200]
    return HubError(f"{repo}: the hub refuses the upload ({status}: {reason}): {again}")


@contextmanager
def _quiet(progress: bool) -> Iterator[None]:
    """Keep huggingface_hub's warnings from stderr, which say what the errors here do; bars are for terminals alone."""
    were_disabled, verbosity = are_progress_bars_disabled(), get_verbosity()
    set_verbosity_error()  # type: ignore[no-untyped-call]
    if not (progress and sys.stderr.isatty()):
        disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        set_verbosity(verbosity)
        if not were_disabled:
            enable_progress_bars()
