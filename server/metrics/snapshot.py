"""The metrics of a process or of the service as plain values, which msgspec can encode."""

from __future__ import annotations

import msgspec


class Series(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One series of a family.

    Attributes:
        labels: values of the family's `label_names`, in their order.
        value: a counter's total, a gauge's value, or the sum of a histogram's observations.
        counts: a histogram's observations in each bucket, without those of lower buckets.
        created: when counting began, in seconds since 1970; None for gauges and the counters of the process.
    """

    labels: tuple[str, ...]
    value: float
    counts: tuple[float, ...] = ()
    created: float | None = None


class Family(msgspec.Struct, frozen=True, array_like=True):
    """One metric and its series.

    Attributes:
        name: without a counter's `_total`.
        type: ``counter``, ``gauge`` or ``histogram``.
        bounds: upper bounds of a histogram's buckets, infinity last.
    """

    name: str
    documentation: str
    type: str
    label_names: tuple[str, ...]
    series: tuple[Series, ...]
    bounds: tuple[float, ...] = ()


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """The metrics of one process, or of the service, at one moment."""

    families: tuple[Family, ...]
