"""Opens the registry that the settings name."""

from __future__ import annotations

from pathlib import Path

from deltastore.registry import Registry
from deltastore.registry.object_cache import ObjectCache
from deltastore.registry.place import is_bucket
from deltastore.user_cache import user_cache_dir
from server.settings import Settings

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
    cache = None
    if is_bucket(settings.registry):
        cache = ObjectCache(_cache(settings), settings.registry_cache_bytes)
    return Registry.open(settings.registry, cache, make=make)


def _cache(settings: Settings) -> Path:
    return settings.registry_cache or user_cache_dir() / CACHE
