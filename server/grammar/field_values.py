"""Values of call arguments that a chat template writes one by one, strings without quotes, by their JSON schemas."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import DecodeError, Raw, Struct
from msgspec.json import Decoder, decode

# Any text, in a regular expression.
ANY = r"(.|\n)*"
# Keywords of parameters that say more than which properties there are.
BESIDE_PROPERTIES = frozenset(
    (
        "anyOf", "oneOf", "allOf", "$ref", "not", "if", "enum", "const", "minProperties", "maxProperties",
        "patternProperties", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies",
    )
)  # fmt: skip
# Keywords that say nothing of a value.
REMARKS = frozenset(
    ("title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly")
)
# Keywords, branches and listed values of one request that are read, those behind each reference again; more than a
# request has without references.
MAX_PARTS = 1 << 16
JSON_TYPES = (
    (bool, "boolean"),
    (str, "string"),
    (int, "integer"),
    (float, "number"),
    (dict, "object"),
    (list, "array"),
)
TYPES = frozenset(("null", *(name for _, name in JSON_TYPES)))
REFERENCE = re.compile(r"#/(\$defs|definitions)/([^/~%]+)")
# Escaped characters and classes of a regular expression, what it must not have beside its ends (anchors and groups of
# other kinds), and the letters that it may escape, which have no references and word boundaries.
ESCAPED = re.compile(r"\\.", re.DOTALL)
CLASS_OR_ESCAPED = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]", re.DOTALL)
UNSUPPORTED = re.compile(r"[\^$]|\(\?(?!:)")
ESCAPES = frozenset("dDwWsSnrt")
# As ECMA's, which are of ASCII.
CLASSES = {r"\d": "0-9", r"\w": "A-Za-z0-9_"}


@dataclass(frozen=True, slots=True)
class FieldValue:
    """How one argument is written.

    Args:
        types: that it has in JSON, where it may be read as them; empty for any text.
        choices: the only texts; None if others may be.
        regexes: that its text must match, all of them, or be one of the choices.
        is_json: it is JSON.
    """

    types: tuple[str, ...]
    choices: tuple[str, ...] | None = None
    regexes: tuple[str, ...] = ()
    is_json: bool = False


class FieldReader:
    """Reads the schemas of one request's arguments, at most `MAX_PARTS` of their parts."""

    def __init__(self) -> None:
        self._left = MAX_PARTS

    def value(self, schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> FieldValue | None:
        """Return how values are written; None where text does not tell which it is, or cannot be held to the schema."""
        branches = self._branches(schema, definitions)
        if branches is None:
            return None
        types = [each for branch in branches for each in _types_of(branch)]
        known = tuple(dict.fromkeys(types))
        if all(branch.keys() <= {"type"} for branch in branches) and ("string" in known or not any(branches)):
            return FieldValue(known)
        if not all(map(_types_of, branches)):
            return None
        if "string" not in known:
            return FieldValue(known, is_json=True)
        others = [branch for branch in branches if branch != {"type": "null"}]
        nulls = ("null",) if len(others) < len(branches) else ()
        if not {*known} <= {"string", "null"}:
            return None
        if all(
            branch.keys() & {"enum", "const"} and branch.keys() <= {"type", "enum", "const"}
            for branch in others
        ):
            values = [value for branch in others for value in _values_of(branch)]
            texts = ["null" if value is None else str(value) for value in values]
            return FieldValue(known, (*dict.fromkeys(texts), *nulls))
        if len(others) != 1 or not others[0].keys() <= {"type", "pattern", "minLength", "maxLength"}:
            return None
        regexes = _regexes(others[0])
        return None if regexes is None else FieldValue(known, nulls or None, regexes)

    def _branches(
        self, schema: Mapping[str, Any], definitions: Mapping[str, Any]
    ) -> list[dict[str, Any]] | None:
        """Return the schemas of which a value matches one, without remarks and references; None if there are none."""
        pending, found = [schema], list[dict[str, Any]]()
        while pending:
            schema = pending.pop()
            self._left -= (
                sum(len(each) for each in (schema, *schema.values()) if isinstance(each, dict | list)) + 1
            )
            if self._left < 0:
                return None
            own = {key: value for key, value in schema.items() if key not in REMARKS}
            key = next(iter(own), "") if len(own) == 1 else ""
            value = own.get(key)
            parts: Any = [own]
            if key in ("anyOf", "oneOf") or (key == "allOf" and isinstance(value, list) and len(value) == 1):
                parts = value
            elif key == "$ref":
                named = REFERENCE.fullmatch(value) if isinstance(value, str) else None
                parts = [] if named is None else [definitions.get(named[1], {}).get(named[2])]
            elif isinstance(own.get("type"), list):
                parts = [{**own, "type": each} for each in own["type"]]
            else:
                found.append(own)
                continue
            if not isinstance(parts, list) or not parts or not all(isinstance(part, dict) for part in parts):
                return None
            pending += reversed(parts)
        return found


def _values_of(branch: Mapping[str, Any]) -> list[Any]:
    """Return the values that a schema lists, of its type."""
    listed = branch["enum"] if isinstance(branch.get("enum"), list) else [branch.get("const")]
    values = [value for value in listed if "const" not in branch or value == branch["const"]]
    declared = branch.get("type")
    return [
        value
        for value in values
        if declared in (None, _type_of(value)) or (declared, _type_of(value)) == ("number", "integer")
    ]


def _type_of(value: Any) -> str:
    return next((name for kind, name in JSON_TYPES if isinstance(value, kind)), "null")


def _types_of(branch: Mapping[str, Any]) -> list[str]:
    if branch.keys() & {"enum", "const"}:
        return [_type_of(value) for value in _values_of(branch)]
    return [branch["type"]] if isinstance(branch.get("type"), str) else []


def _regexes(branch: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return regular expressions of texts, all of which a string's keywords ask for; None if there are none such."""
    low, high = branch.get("minLength", 0), branch.get("maxLength")
    if (
        not isinstance(low, int)
        or not isinstance(high, int | None)
        or low < 0
        or (high is not None and high < low)
    ):
        return None
    regexes = [rf"(.|\n){{{low},{'' if high is None else high}}}"]
    if "pattern" in branch:
        pattern = branch["pattern"]
        regex = _whole(pattern) if isinstance(pattern, str) else None
        if regex is None:
            return None
        regexes.append(regex)
    return tuple(regexes)


def _whole(pattern: str) -> str | None:
    """Return the regular expression of texts in which a pattern is found; None if it has parts beyond such."""
    begins = pattern.startswith("^")
    body = pattern[begins:]
    ends = body.endswith("$") and (len(body) - len(body[:-1].rstrip("\\"))) % 2 == 1
    body = body[: len(body) - ends]
    bare = CLASS_OR_ESCAPED.sub("", body)
    letters = {part[1] for part in ESCAPED.findall(body) if part[1].isalnum()}
    if UNSUPPORTED.search(bare) or not letters <= ESCAPES:
        return None
    depth = 0
    for character in bare if begins or ends else "":
        depth += (character == "(") - (character == ")")
        # An anchor belongs to one branch only.
        if character == "|" and not depth:
            return None
    regex = CLASS_OR_ESCAPED.sub(_of_ascii, body)
    return f"{'' if begins else ANY}({regex}){'' if ends else ANY}"


def _of_ascii(part: re.Match[str]) -> str:
    if part[0] in CLASSES:
        return f"[{CLASSES[part[0]]}]"
    return ESCAPED.sub(lambda each: CLASSES.get(each[0], each[0]), part[0]) if part[0][0] == "[" else part[0]


class _Function(Struct):
    name: str
    parameters: Raw = Raw(b"null")


class _Tool(Struct):
    function: _Function


_tools = Decoder(list[_Tool])


class ArgumentTypes:
    """The types that arguments may have in JSON, through unions and references; read when a tool is called.

    Args:
        tools: a JSON array of functions; empty for none.
    """

    def __init__(self, tools: bytes) -> None:
        self._tools = tools
        self._parameters: dict[str, Raw] | None = None
        self._types: dict[str, Mapping[str, frozenset[str]]] = {}

    def of(self, tool: str) -> Mapping[str, frozenset[str]]:
        """Return the types of a tool's arguments, by key."""
        if self._parameters is None:
            functions = [each.function for each in _tools.decode(self._tools)] if self._tools else []
            self._parameters = {each.name: each.parameters for each in functions}
        if tool not in self._types:
            parameters = self._parameters.get(tool)
            self._types[tool] = {} if parameters is None else _argument_types(decode(parameters))
        return self._types[tool]


def _argument_types(parameters: Any) -> Mapping[str, frozenset[str]]:
    """Return the types of each property. Each schema is read once, however often others refer to it."""
    if not isinstance(parameters, dict):
        return {}
    types = dict[tuple[str, str], set[str]]()
    referring = dict[tuple[str, str], list[tuple[str, str]]]()
    for group in ("properties", "$defs", "definitions"):
        schemas = parameters.get(group)
        for name, schema in schemas.items() if isinstance(schemas, dict) else ():
            types[group, name], referred = _own_types(schema)
            for place in referred:
                referring.setdefault(place, []).append((group, name))
    # Those of a schema go to all that refer to it; there are few types, so each is passed on few times.
    pending = list(types)
    while pending:
        place = pending.pop()
        for user in referring.get(place, ()):
            if not types[place] <= types[user]:
                types[user] |= types[place]
                pending.append(user)
    return {name: frozenset(found) for (group, name), found in types.items() if group == "properties"}


def _own_types(schema: Any) -> tuple[set[str], list[tuple[str, str]]]:
    """Return the types that a schema and its branches name, and the places of those that it refers to."""
    types, referred, pending = set[str](), list[tuple[str, str]](), [schema]
    while pending:
        own = pending.pop()
        if not isinstance(own, dict):
            continue
        declared = own.get("type")
        named = declared if isinstance(declared, list) else [declared]
        if declared is None and own.keys() & {"enum", "const"}:
            named = [_type_of(value) for value in _values_of(own)]
        types |= {name for name in named if isinstance(name, str) and name in TYPES}
        reference = own.get("$ref")
        if isinstance(reference, str) and (found := REFERENCE.fullmatch(reference)):
            referred.append((found[1], found[2]))
        for key in ("anyOf", "oneOf", "allOf"):
            branches = own.get(key)
            pending += branches if isinstance(branches, list) else []
    return types, referred


READ_TYPES: Mapping[str, Any] = {"integer": int, "number": int | float, "object": dict, "array": list}


def typed(text: str, types: Collection[str]) -> Any:
    """Return the value of an argument that is written as text: text, unless it fits another type of the schema."""
    # One line break belongs to the markup.
    text = text.removeprefix("\n").removesuffix("\n")
    bare = text.strip()
    for name in types:
        if name == "null" and bare in ("null", "None"):
            return None
        if name == "boolean" and bare.lower() in ("true", "false"):
            return bare.lower() == "true"
        if name in READ_TYPES:
            value = _json_value(bare)
            if isinstance(value, READ_TYPES[name]) and not isinstance(value, bool):
                return value
    return text


def _json_value(text: str) -> Any:
    try:
        return decode(text)
    except (DecodeError, UnicodeEncodeError, RecursionError):
        return None
