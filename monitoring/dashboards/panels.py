"""The kinds of panels that dashboards have, all with one look. Knows no metric.

A query is PromQL and the legend of its series, text with labels as `{{label}}`. A description says what a panel shows
and, after that, what to do about it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    timeseries,
)
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.variants import Dataquery
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

# Grafana's grid has 24 columns.
SIXTH, THIRD, HALF, WHOLE = 4, 8, 12, 24
HEIGHT, LOW, TALL = 8, 4, 12
DATASOURCE = kinds.DataSourceRef(type_val="prometheus", uid="${datasource}")
GREEN, YELLOW, RED = "green", "yellow", "red"
HEALTHY: Mapping[float | None, str] = {None: GREEN}

PanelBuilder = Builder[models.Panel]
Query = tuple[str, str]


def lines(
    title: str,
    description: str,
    unit: str,
    queries: Sequence[Query],
    *,
    width: int = THIRD,
    stacked: bool = False,
) -> PanelBuilder:
    """Return series over time, with their mean, maximum and last value."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .min(0)
        .span(width)
        .height(HEIGHT)
        .fill_opacity(10)
        .show_points(kinds.VisibilityMode.NEVER)
        .legend(_legend())
        .tooltip(_tooltip())
        .targets(_targets(queries))
    )
    if stacked:
        panel.stacking(common.StackingConfig().mode(kinds.StackingMode.NORMAL).group("A"))
    return panel


def number(
    title: str,
    description: str,
    unit: str,
    queries: Sequence[Query],
    *,
    steps: Mapping[float | None, str] = HEALTHY,
) -> PanelBuilder:
    """Return the last value in large type.

    Args:
        steps: colors from a value on, in rising order; None is the color below all others.
    """
    thresholds = [models.Threshold(value, color) for value, color in steps.items()]
    return (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .span(SIXTH)
        .height(LOW)
        .graph_mode(kinds.BigValueGraphMode.AREA)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(thresholds))
        .targets(_targets(queries))
    )


def states(
    title: str,
    description: str,
    queries: Sequence[Query],
    mappings: Mapping[str, tuple[str, str]] | None = None,
) -> PanelBuilder:
    """Return one row per series, with the value as a state over time.

    Args:
        mappings: a text and a color by value.
    """
    panel = (
        statetimeline.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .span(WHOLE)
        .height(TALL)
        .merge_values(True)
        .show_value(kinds.VisibilityMode.AUTO)
        .row_height(0.8)
        .legend(common.VizLegendOptions().show_legend(False).calcs([]))
        .targets(_targets(queries))
    )
    if mappings is not None:
        results = {
            value: models.ValueMappingResult(text=text, color=color)
            for value, (text, color) in mappings.items()
        }
        panel.mappings([models.ValueMap(options=results)])
    return panel


def distribution(title: str, description: str, unit: str, buckets: str) -> PanelBuilder:
    """Return a histogram over time; `buckets` is PromQL of its rates by `le`."""
    query = _target("A", buckets, "{{le}}").format(PromQueryFormat.HEATMAP)
    return (
        heatmap.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit("cps")
        .span(THIRD)
        .height(HEIGHT)
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .show_value(kinds.VisibilityMode.NEVER)
        .with_target(query)
    )


def _targets(queries: Sequence[Query]) -> list[Builder[Dataquery]]:
    return [_target(chr(ord("A") + index), *query) for index, query in enumerate(queries)]


def _target(name: str, expression: str, legend: str) -> prometheus.Dataquery:
    query = prometheus.Dataquery().ref_id(name).datasource(DATASOURCE)
    return query.expr(expression).legend_format(legend).range()


def _legend() -> common.VizLegendOptions:
    legend = common.VizLegendOptions().show_legend(True).calcs(["mean", "max", "lastNotNull"])
    return legend.display_mode(kinds.LegendDisplayMode.TABLE).placement(kinds.LegendPlacement.BOTTOM)


def _tooltip() -> common.VizTooltipOptions:
    return common.VizTooltipOptions().mode(kinds.TooltipDisplayMode.MULTI).sort(kinds.SortOrder.DESCENDING)
