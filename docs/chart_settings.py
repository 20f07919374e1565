"""Write the settings of `peraxis serve` into the schema of the chart's values: `python -m docs.chart_settings`.

Owns which settings belong to the chart and are no values. The rest of the schema is written by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaWarningKind

from server.settings import Settings
from server.tenants.tenant import FIELDS

SCHEMA = Path(__file__).resolve().parent.parent / "helm" / "peraxis" / "values.schema.json"
# Where the chart mounts its volumes and listens.
OWNED_BY_CHART = frozenset(
    {"base", "registry", "registry_cache", "registry_cache_gb", "host", "port", "admin_port"}
)
# Parts of a field's JSON schema that a value of YAML is held against.
KEPT = ("type", "enum", "minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "minLength", "pattern")
WIDTH = 110


def settings_schema() -> dict[str, Any]:
    """Return the JSON schema of the value `settings`, from the settings themselves."""
    described = Settings.model_json_schema(schema_generator=_Quiet)["properties"]
    properties = {
        name: _value_schema(name, described[name])
        for name in Settings.model_fields
        if name not in OWNED_BY_CHART
    }
    return {
        "type": "object",
        "additionalProperties": False,
        "required": ["auth", "shutdown_timeout"],
        "properties": properties,
    }


def main() -> None:
    """Replace the settings in the chart's schema."""
    document = json.loads(SCHEMA.read_text())
    document["properties"]["settings"] = settings_schema()
    SCHEMA.write_text(as_text(document) + "\n")


def as_text(value: Any, indent: int = 0, taken: int = 0) -> str:
    """Return a value as JSON whose small objects and lists stand on one line."""
    flat = json.dumps(value, ensure_ascii=False)
    if indent + taken + len(flat) <= WIDTH or not isinstance(value, (dict, list)):
        return flat
    inner = indent + 2
    if isinstance(value, dict):
        named = [(f"{json.dumps(key)}: ", each) for key, each in value.items()]
        lines = [f"{name}{as_text(each, inner, len(name) + 1)}" for name, each in named]
        opening, closing = "{", "}"
    else:
        lines = [as_text(each, inner, 1) for each in value]
        opening, closing = "[", "]"
    separator = ",\n" + " " * inner
    return f"{opening}\n{' ' * inner}{separator.join(lines)}\n{' ' * indent}{closing}"


class _Quiet(GenerateJsonSchema):
    def emit_warning(self, kind: JsonSchemaWarningKind, detail: str) -> None:
        """Leave out a default that has no JSON, without a warning."""


def _value_schema(name: str, described: dict[str, Any]) -> dict[str, Any]:
    if name == "default_limits":
        limit = {"type": "integer", "minimum": 0}
        return {"type": "object", "additionalProperties": False, "properties": dict.fromkeys(FIELDS, limit)}
    if name in ("source_dir", "allowed_host"):
        # Directories with colons between them and hosts with commas, as the environment holds them.
        return {"type": "string", "minLength": 1}
    # A setting without a value is left out of the values.
    allowed = next(each for each in described.get("anyOf", [described]) if each["type"] != "null")
    return {key: allowed[key] for key in KEPT if key in allowed}


if __name__ == "__main__":
    main()
