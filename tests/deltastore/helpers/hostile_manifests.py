"""Hostile manifests in a valid safetensors header: JSON, fields, sizes and names that ArtifactWriter never writes."""

from __future__ import annotations

from deltastore.format.manifest import FORMAT_KEY, MANIFEST_KEY
from tests.deltastore.helpers.hostile import (
    Hostile,
    assemble,
    with_header,
    with_manifest,
    with_manifest_text,
    with_spec,
)
from tests.helpers.tiny_artifact import BOTH, EMBEDDING, NORM

LONG = "x" * 1_000_000

MANIFESTS = [
    Hostile("no metadata", with_header(lambda h: h.pop("__metadata__")), "not a Peraxis artifact"),
    Hostile("plain safetensors", lambda raw: assemble("{}"), "not a Peraxis artifact"),
    Hostile(
        "no manifest", with_header(lambda h: h["__metadata__"].pop(MANIFEST_KEY)), "not a Peraxis artifact"
    ),
    Hostile(
        "format 3", with_header(lambda h: h["__metadata__"].update({FORMAT_KEY: "3"})), "artifact format '3'"
    ),
    Hostile(
        "long format", with_header(lambda h: h["__metadata__"].update({FORMAT_KEY: LONG})), "artifact format"
    ),
    Hostile(
        "manifest that is no JSON", with_manifest_text(lambda t: t[:-1]), "manifest: its JSON cannot be read"
    ),
    Hostile(
        "manifest that is a list", with_manifest_text(lambda t: "[]"), "manifest: it is not a JSON object"
    ),
    Hostile(
        "deep manifest",
        with_manifest_text(lambda t: "[" * 100_000),
        "manifest: its JSON is nested too deeply",
    ),
    Hostile(
        "manifest with NaN",
        with_manifest_text(lambda t: t.replace("0.25", "NaN")),
        "the number 'NaN' is not allowed",
    ),
    Hostile(
        "manifest with 1e999",
        with_manifest_text(lambda t: t.replace("0.25", "1e999")),
        "the number '1e999' is not allowed",
    ),
    Hostile(
        "manifest key twice", with_manifest_text(lambda t: '{"tied":true,' + t[1:]), "key 'tied' stands twice"
    ),
    Hostile(
        "lone surrogate in the fidelity report",
        with_manifest_text(lambda t: t.replace('"kl"', '"\\ud800"')),
        "surrogates not allowed",
    ),
    Hostile("no base id", with_manifest(lambda m: m.pop("base_id")), "manifest: base_id: Field required"),
    Hostile("unknown field", with_manifest(lambda m: m.update({"a\nb": 1})), "unknown field 'a\\nb'"),
    Hostile("long unknown field", with_manifest(lambda m: m.update({LONG: 1})), "unknown field"),
    Hostile(
        "fifty thousand unknown fields",
        with_manifest(lambda m: m.update({f"{i}": 1 for i in range(50_000)})),
        "field '0'",
    ),
    Hostile(
        "base id of two lines",
        with_manifest(lambda m: m.update(base_id="a\nb")),
        "base_id: Value error, 'a\\nb' holds",
    ),
    Hostile("against NUL", with_spec(BOTH, against="\0"), "against: Value error, '\\x00' holds"),
    Hostile("against a long name", with_spec(BOTH, against=LONG), "against: String should have at most 512"),
    Hostile(
        "long base id",
        with_manifest(lambda m: m.update(base_id=LONG)),
        "base_id: String should have at most 512",
    ),
    Hostile(
        "base id that is a number",
        with_manifest(lambda m: m.update(base_id=7)),
        "base_id: Input should be a valid string",
    ),
    Hostile(
        "short fingerprint",
        with_manifest(lambda m: m.update(base_fingerprint="5f")),
        "base_fingerprint: String should match",
    ),
    Hostile(
        "upper-case fingerprint",
        with_manifest(lambda m: m.update(base_fingerprint="5F" * 32)),
        "base_fingerprint: String should",
    ),
    Hostile(
        "unknown method", with_manifest(lambda m: m.update(method="zip")), "method: Input should be 'scalar'"
    ),
    Hostile(
        "tied is a number", with_manifest(lambda m: m.update(tied=1)), "tied: Input should be a valid boolean"
    ),
    Hostile(
        "negative device_bytes",
        with_manifest(lambda m: m.update(device_bytes=-1)),
        "device_bytes: Input should be greater",
    ),
    Hostile(
        "float device_bytes",
        with_manifest(lambda m: m.update(device_bytes=320.0)),
        "device_bytes: Input should be a valid int",
    ),
    Hostile(
        "bool device_bytes",
        with_manifest(lambda m: m.update(device_bytes=True)),
        "device_bytes: Input should be a valid int",
    ),
    Hostile(
        "huge device_bytes",
        with_manifest(lambda m: m.update(device_bytes=2**63)),
        "device_bytes: Input should be less",
    ),
    Hostile(
        "tensors that are a list",
        with_manifest(lambda m: m.update(tensors=[])),
        "tensors: Input should be a valid dict",
    ),
    Hostile(
        "spec that is text",
        with_manifest(lambda m: m["tensors"].update({NORM: "whole"})),
        "it is not a JSON object",
    ),
    Hostile(
        "unknown codec",
        with_spec(NORM, codec="pickle"),
        "codec: Input should be 'onebit', 'whole' or 'stack'",
    ),
    Hostile(
        "unknown axis",
        with_spec(BOTH, axis="diagonal"),
        "axis: Input should be 'scalar', 'out', 'in' or 'both'",
    ),
    Hostile("unknown spec field", with_spec(NORM, dtype="F16"), "unknown field 'dtype'"),
    Hostile("one bit without axis", with_spec(BOTH, axis=None), "a onebit tensor needs an axis"),
    Hostile(
        "one bit of three dimensions",
        with_spec(BOTH, shape=[5, 13, 1]),
        "a onebit tensor needs an axis, two dim",
    ),
    Hostile(
        "more rows added than there are",
        with_spec(BOTH, added_rows=6),
        "at most its own number of added rows",
    ),
    Hostile(
        "negative rows added", with_spec(EMBEDDING, added_rows=-2), "added_rows: Input should be greater"
    ),
    Hostile("bool in a shape", with_spec(NORM, shape=[True]), "shape: 0: Input should be a valid integer"),
    Hostile("huge shape", with_spec(NORM, shape=[2**62]), "shape: 0: Input should be less than"),
    Hostile("many dimensions", with_spec(NORM, shape=[1] * 9), "shape: List should have at most 8 items"),
    Hostile("whole with an axis", with_spec(NORM, axis="out"), "a whole tensor has no axis"),
    Hostile(
        "error that is infinite",
        with_manifest_text(lambda t: t.replace("0.5", "Infinity")),
        "'Infinity' is no",
    ),
    Hostile("error that is text", with_spec(BOTH, error="small"), "error: Input should be a valid number"),
    Hostile(
        "path as a file",
        with_manifest(lambda m: m.update(files=["../../etc/passwd"])),
        "'../../etc/passwd' is not one of the files",
    ),
    Hostile(
        "path as a template",
        with_manifest(lambda m: m.update(files=["additional_chat_templates/../x.jinja"])),
        "'additional_chat_templates/../x.jinja' is not one of the files",
    ),
    Hostile(
        "absolute path as a file",
        with_manifest(lambda m: m.update(files=["/etc/passwd"])),
        "'/etc/passwd' is not one of",
    ),
    Hostile(
        "NUL in a file",
        with_manifest(lambda m: m.update(files=["vocab.txt\0"])),
        "'vocab.txt\\x00' is not one of",
    ),
    Hostile(
        "code as a file",
        with_manifest(lambda m: m["files"].append("modeling.py")),
        "'modeling.py' is not one of the files",
    ),
    Hostile(
        "too many files",
        with_manifest(lambda m: m.update(files=["vocab.txt"] * 99)),
        "files: List should have at most",
    ),
    Hostile(
        "deep fidelity report",
        with_manifest_text(lambda t: t.replace("0.25", "[" * 16 + "]" * 16)),
        "fidelity: Value error, nested more than 16 deep",
    ),
    Hostile(
        "long fidelity report",
        with_manifest(lambda m: m["fidelity"].update(note=LONG)),
        "fidelity: Value error, longer than",
    ),
]
