"""A dashboard of rows of panels: its variables, annotations, links and ids. Knows what selects targets, not panels."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

from monitoring.dashboards.panels import DATASOURCE, PanelBuilder
from monitoring.promql import Scope

SCOPE = Scope('job=~"$job",namespace=~"$namespace",instance=~"$instance"', "$__rate_interval")
VARIANT, TENANT = 'variant=~"$variant"', 'tenant=~"$tenant"'
ALL = models.VariableOption(selected=True, text="All", value="$__all")
# Grafana asks for annotations in steps of this length.
ANNOTATION_STEP = "1m"
PROMOTIONS = f"max by (variant) (changes({SCOPE.series('variant_active_version')}[{ANNOTATION_STEP}])) > 0"
COPY_LIMIT = "copy_limit"


@dataclass(frozen=True, slots=True)
class Section:
    """A row of a dashboard and the panels below it."""

    title: str
    panels: tuple[PanelBuilder, ...]


@dataclass(frozen=True, slots=True)
class Page:
    """One dashboard.

    Attributes:
        uid: identifies the dashboard in Grafana; links and bookmarks contain it.
        variables: beside those that select targets.
    """

    uid: str
    title: str
    description: str
    sections: tuple[Section, ...]
    variables: tuple[dashboard.QueryVariable | dashboard.TextBoxVariable, ...] = ()

    def model(self) -> models.Dashboard:
        """Return the dashboard as Grafana's schema has it."""
        builder = (
            dashboard.Dashboard(self.title)
            .uid(self.uid)
            .description(self.description)
            .tags(["peraxis"])
            .editable()
            .time("now-1h", "now")
            .refresh("30s")
            .tooltip(models.DashboardCursorSync.CROSSHAIR)
            .link(_other_dashboards())
            .annotation(_promotions())
            .variables([*_target_variables(), *self.variables])
        )
        for section in self.sections:
            builder.with_row(dashboard.Row(section.title))
            for panel in section.panels:
                builder.with_panel(panel)
        built = builder.build()
        for number, placed in enumerate(built.panels or [], 1):
            placed.id_val = number
        return built

    def text(self) -> str:
        """Return the dashboard's JSON."""
        return json.dumps(self.model(), cls=JSONEncoder, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def label_variable(name: str, series: str, label: str, description: str) -> dashboard.QueryVariable:
    """Return a choice among the values of a series' label, all of them at first."""
    query = f"label_values({series}, {name})"
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .description(description)
        .datasource(DATASOURCE)
        .query({"qryType": 1, "query": query, "refId": "PrometheusVariableQueryEditor-VariableQuery"})
        .definition(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        # Matches targets without the label, too, which Grafana's own "all" leaves out.
        .all_value(".*")
        .current(ALL)
    )


def copy_limit_variable() -> dashboard.TextBoxVariable:
    """Return the field for the rate at which the host can copy to the device."""
    return (
        dashboard.TextBoxVariable(COPY_LIMIT)
        .label("Copy limit")
        .description("Bytes per second that the host copies into the device's memory, to compare loads with.")
        .default_value("50e9")
        .current(models.VariableOption(selected=True, text="50e9", value="50e9"))
    )


def _target_variables() -> Sequence[dashboard.DatasourceVariable | dashboard.QueryVariable]:
    ready = "peraxis_ready"
    in_namespace = f'{ready}{{namespace=~"$namespace"}}'
    in_job = f'{ready}{{namespace=~"$namespace",job=~"$job"}}'
    return (
        dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"),
        label_variable("namespace", ready, "Namespace", "Kubernetes namespace of the servers."),
        label_variable("job", in_namespace, "Job", "The service that the servers belong to."),
        label_variable("instance", in_job, "Instance", "One server."),
    )


def _promotions() -> dashboard.AnnotationQuery:
    return (
        dashboard.AnnotationQuery()
        .name("Promotions")
        .datasource(DATASOURCE)
        .enable(True)
        .icon_color("purple")
        .expr(PROMOTIONS)
        .step(ANNOTATION_STEP)
        .title_format("Promoted or rolled back")
        .text_format("{{variant}}")
        .tag_keys("variant")
    )


def _other_dashboards() -> dashboard.DashboardLink:
    link = dashboard.DashboardLink("Peraxis").type(models.DashboardLinkType.DASHBOARDS).tags(["peraxis"])
    return link.as_dropdown(False).include_vars(True).keep_time(True)
