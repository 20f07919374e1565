"""Opens the registry that the settings name, and tells the directory of the records beside it. Makes no call."""

from __future__ import annotations

from pathlib import Path

from deltastore.registry import Registry
from deltastore.registry.backend import open_backend
from deltastore.registry.object_cache import ObjectCache
from deltastore.registry.place import is_bucket
from deltastore.user_cache import user_cache_dir
from server.settings import Settings
from server.volume.calls import RegistryCalls

# In the user's cache directory.
CACHE = "registry"


def open_registry(settings: Settings, *, make: bool = True) -> Registry:
    """Open the registry; a bucket's objects are kept in the directory of `--registry-cache`.

    Args:
        settings: those of the server.
        make: create what is missing. Without it, the registry is neither read nor written now.

    Raises:
        UsageError: the location is malformed.
        RegistryError: the registry or the cache cannot be opened.
    """
    if not is_bucket(settings.registry):
        return Registry(Path(settings.registry), make=make)
    cache = ObjectCache(_cache(settings), settings.registry_cache_bytes)
    return Registry(open_backend(settings.registry, cache, is_made=True), make=make)


def records_directory(settings: Settings) -> Path:
    """Return the directory that holds keys, limits and the audit log below it.

    A bucket has no keys and limits, and the audit log of this machine is in its cache.
    """
    return _cache(settings) if is_bucket(settings.registry) else Path(settings.registry).absolute()


def volume_of(settings: Settings, calls: RegistryCalls) -> RegistryCalls | None:
    """Return the calls of a registry if `records_directory` lies in it; the cache of a bucket does not fail with it."""
    return None if is_bucket(settings.registry) else calls


def _cache(settings: Settings) -> Path:
    return settings.registry_cache or user_cache_dir() / CACHE
