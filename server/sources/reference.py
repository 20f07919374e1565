"""A file on a Hugging Face hub as clients name it: `hf://ORG/REPO@REVISION[/FILE]`. Asks no hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote

from deltastore.errors import shown
from server.errors import InvalidRequest

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
