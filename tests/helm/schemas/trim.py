"""Make the JSON schema of a custom resource from its definition: `python -m tests.helm.schemas.trim CRD.yaml VERSION`.

Owns what a schema here leaves out. Kubernetes drops unknown fields of a custom resource; these schemas refuse them,
because a field that is dropped is a mistake in the chart.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

Schema = dict[str, Any]

# Text for people, rules in CEL that JSON schema cannot hold, and formats of numbers.
LEFT_OUT = {"description", "format", "nullable", "default", "example", "externalDocs"}
# Characters of a part that is worth a definition of its own where it occurs again.
SHARED_CHARS = 120


def trimmed(definition: Any, version: str) -> Schema:
    """Return the strict JSON schema of one version of a CustomResourceDefinition."""
    versions = definition["spec"]["versions"]
    whole = _strict(next(each["schema"]["openAPIV3Schema"] for each in versions if each["name"] == version))
    texts: Counter[str] = Counter()
    _count(whole, texts)
    repeated = [text for text in sorted(texts) if texts[text] > 1 and len(text) > SHARED_CHARS]
    names = {text: f"d{number}" for number, text in enumerate(repeated)}

    def shared(part: Schema) -> Schema:
        name = names.get(_text(part))
        return _with_parts(part, shared) if name is None else {"$ref": f"#/$defs/{name}"}

    parts = {name: _with_parts(json.loads(text), shared) for text, name in names.items()}
    whole = shared(whole)
    return {"$defs": _reachable(whole, parts), **whole}


def _with_parts(schema: Schema, change: Callable[[Schema], Schema]) -> Schema:
    """Return a schema with its direct parts changed."""
    changed = dict(schema)
    for key in ("items", "additionalProperties", "not"):
        if isinstance(schema.get(key), dict):
            changed[key] = change(schema[key])
    for key in ("allOf", "anyOf", "oneOf"):
        if key in schema:
            changed[key] = [change(part) for part in schema[key]]
    if "properties" in schema:
        changed["properties"] = {name: change(part) for name, part in schema["properties"].items()}
    return changed


def _strict(schema: Schema) -> Schema:
    kept = {key: value for key, value in schema.items() if key not in LEFT_OUT and not key.startswith("x-")}
    if schema.get("nullable") and "type" in kept:
        kept["type"] = [kept["type"], "null"]
    if "properties" in kept and "type" in kept and not schema.get("x-kubernetes-preserve-unknown-fields"):
        # A part without a type restricts some fields of the schema around it, and names no others.
        kept.setdefault("additionalProperties", False)
    return _with_parts(kept, _strict)


def _count(schema: Schema, texts: Counter[str]) -> Schema:
    texts[_text(schema)] += 1
    return _with_parts(schema, lambda part: _count(part, texts))


def _text(schema: Schema) -> str:
    return json.dumps(schema, sort_keys=True)


def _reachable(whole: Schema, parts: dict[str, Schema]) -> dict[str, Schema]:
    """Return the definitions that the whole schema refers to, itself or through others."""
    found: dict[str, Schema] = {}
    waiting = [whole]
    while waiting:
        text = json.dumps(waiting.pop())
        for name in parts.keys() - found.keys():
            if f'"#/$defs/{name}"' in text:
                found[name] = parts[name]
                waiting.append(parts[name])
    return dict(sorted(found.items(), key=lambda item: int(item[0][1:])))


if __name__ == "__main__":
    print(
        json.dumps(trimmed(yaml.safe_load(Path(sys.argv[1]).read_text()), sys.argv[2]), separators=(",", ":"))
    )
