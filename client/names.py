"""Names, versions and ids, as users write them, and the paths of their routes."""

from __future__ import annotations

import re
from urllib.parse import quote

from deltastore.errors import UsageError

# Digits of a version number, so that an absurd one takes no time.
MAX_VERSION_DIGITS = 9
# A variant's name, or a tenant's.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# An id, or the key that begins with it.
KEY_OR_ID = re.compile(r"(?:pxk_)?([0-9a-f]{12})(?:_[0-9a-f]*)?")


def path_of(name: str) -> str:
    """Return the path of a variant's routes.

    Raises:
        UsageError: No variant can have the name.
    """
    # Such a path would belong to another route.
    if not name.strip("."):
        raise UsageError(f"{name!r} is no variant's name: `peraxis ls` lists them")
    if "@" in name:
        raise UsageError(f"{name!r}: give the name without @VERSION")
    return f"/variants/{quote(name, safe='')}"


def tenant_path_of(name: str) -> str:
    """Return the path of a tenant.

    Raises:
        UsageError: No tenant can have the name.
    """
    if NAME.fullmatch(name) is None:
        raise UsageError(f"{name!r} is no tenant's name: `peraxis tenants list` lists them")
    return f"/tenants/{name}"


def check_new_name(name: str) -> None:
    """Raise UsageError if no variant can be published under the name."""
    if NAME.fullmatch(name) is None:
        raise UsageError(
            f"`name` {name!r} cannot be a variant's: take 1 to 64 letters, digits, '.', '_' and '-', "
            "and begin with a letter or digit"
        )


def key_id_of(text: str) -> str:
    """Return the id in an id or a whole API key.

    Raises:
        UsageError: There is none. The message does not repeat the text, which may be a secret.
    """
    found = KEY_OR_ID.fullmatch(text.strip())
    if found is None:
        raise UsageError("a key's id has 12 hex digits: `peraxis keys list` lists them")
    return found[1]


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
