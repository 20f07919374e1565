"""The one exception tree of Peraxis. A message names the thing and the way out; one table maps it to HTTP."""

from __future__ import annotations

import reprlib


class PeraxisError(Exception):
    """Root of every error that a user can cause or repair."""


class UsageError(PeraxisError):
    """Arguments that contradict each other or lie out of range."""


class SettingsError(UsageError):
    """A setting of the service that cannot be used."""


class CheckpointError(PeraxisError):
    """A checkpoint that cannot be read, or that holds what a delta cannot carry."""


class FidelityError(PeraxisError):
    """A delta that is further from its fine-tune than was allowed."""


class ArtifactError(PeraxisError):
    """An artifact that is malformed, truncated or not what its digest says."""


class CorruptObject(ArtifactError):
    """A stored object whose bytes no longer match its digest."""


class BaseMismatch(PeraxisError):
    """A delta made from another base than the one at hand."""


class ArtifactTooLarge(PeraxisError):
    """An artifact larger than a slot or than uploads may be."""


class RegistryError(PeraxisError):
    """A registry whose files or disk refuse: an unreadable record, a failed write."""


class StorageFull(PeraxisError):
    """The disk under the registry or under an output has no room."""


class MemoryTooSmall(PeraxisError):
    """Work that needs more memory than is free."""


class VariantNotFound(PeraxisError):
    """No variant, or no such version of it, that the caller may use."""


class VariantQuarantined(PeraxisError):
    """The variant's stored object was found corrupt and is not served."""


def shown(value: object) -> str:
    """A value from a stranger's file as messages show it: quoted, on one line, and short however long it is."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
