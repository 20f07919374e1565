"""Failures of libraries on tenants' files and requests, as errors that name no path of this server."""

from __future__ import annotations

from functools import partial

from deltastore import errors

failures_as = partial(errors.failures_as, hides_paths=True)
