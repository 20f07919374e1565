"""Names, versions and ids, as users write them, and the paths of their routes."""

from __future__ import annotations

from urllib.parse import quote

from deltastore.errors import UsageError

# Digits of a version number, so that an absurd one takes no time.
MAX_VERSION_DIGITS = 9


def path_of(name: str) -> str:
    """Return the path of a variant's routes.

    Raises:
        UsageError: No variant can have the name.
    """
    # Such a path would belong to another route.
    if not name.strip("."):
        raise UsageError(f"{name!r} is no variant's name: `peraxis ls` lists them")
    return f"/variants/{quote(name, safe='')}"


def key_path(key_id: str) -> str:
    """Return the path of an API key. Raises UsageError if no key can have the id."""
    if not key_id.strip("."):
        raise UsageError(f"{key_id!r} is no key's id: `peraxis keys list` lists them")
    return f"/keys/{quote(key_id, safe='')}"


def parse_reference(reference: str) -> tuple[str, dict[str, str] | None]:
    """Return the name of a NAME[@VERSION], and the query parameters of its version.

    Raises:
        UsageError: The part behind ``@`` is no version number.
    """
    name, at, version = reference.partition("@")
    if not at:
        return name, None
    if not (version.isascii() and version.isdigit() and len(version) <= MAX_VERSION_DIGITS):
        raise UsageError(f"{reference!r}: a version is a number, as in NAME@2")
    return name, {"version": version}
