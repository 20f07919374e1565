"""The results of counting, collecting and checking a registry, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import NamedTuple


class Usage(NamedTuple):
    """The registry's counts and sizes."""

    num_objects: int
    num_bytes: int  # of the objects
    free_bytes: int | None  # of the file system, for this user; a bucket has no such limit
    num_quarantined: int


@dataclass(frozen=True, slots=True)
class GcReport:
    """The garbage that a collection removed, or with `dry_run` found."""

    objects: tuple[str, ...]  # digests
    num_partials: int  # abandoned uploads
    num_leftovers: int  # files that a crash left behind or newer ones replace
    bytes_freed: int
    dry_run: bool


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem with a file, or with a file that is missing."""

    path: PurePath
    problem: str


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The result of a check."""

    findings: tuple[Finding, ...]
    notes: tuple[Finding, ...]  # harmless: gc or another upload resolves them
    num_objects: int
    num_versions: int

    @property
    def is_clean(self) -> bool:
        return not self.findings
