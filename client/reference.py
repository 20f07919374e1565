"""NAME and NAME@VERSION, as users write them, and the routes that they name."""

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
