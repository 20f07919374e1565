"""What an artifact says of itself: its base, the codec of every tensor, the settings and fidelity of its making.

Stored as JSON in the file's safetensors metadata; parsed strictly, because artifacts come from strangers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from deltastore.errors import ArtifactError, shown
from deltastore.format.header import MAX_NAME_CHARS, MAX_RANK, parse_json

FORMAT = 1
FORMAT_KEY = "peraxis.format"
MANIFEST_KEY = "peraxis.manifest"

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "chat_template.jinja",
)  # fmt: skip
GENERATION_FILE = "generation_config.json"
FILES = (*TOKENIZER_FILES, GENERATION_FILE)
MAX_FACTS_BYTES = 256 << 10
MAX_FACTS_DEPTH = 16
MAX_PLANES = 4


def _small(facts: dict[str, Any]) -> dict[str, Any]:
    """Free-form parts are kept in records and sent in replies, so they stay small and shallow."""
    level: list[Any] = [facts]
    for _ in range(MAX_FACTS_DEPTH):
        children = (value.values() if isinstance(value, dict) else value for value in level)
        level = [child for some in children for child in some if isinstance(child, dict | list)]
    if level:
        raise ValueError(f"nested more than {MAX_FACTS_DEPTH} deep")
    if len(json.dumps(facts, allow_nan=False)) > MAX_FACTS_BYTES:
        raise ValueError(f"longer than {MAX_FACTS_BYTES} bytes of JSON")
    return facts


def _known_file(name: str) -> str:
    if name not in FILES:
        raise ValueError(f"{shown(name)} is none of the files that a variant carries")
    return name


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"{shown(text)} holds characters that cannot be printed")
    return text


Facts = Annotated[dict[str, Any], AfterValidator(_small)]
Label = Annotated[str, Field(max_length=MAX_NAME_CHARS), AfterValidator(_printable)]
Filename = Annotated[str, AfterValidator(_known_file)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Size = Annotated[int, Field(ge=0, lt=1 << 62)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


_Parsed = TypeVar("_Parsed", bound=_Strict)


class TensorSpec(_Strict):
    """How one tensor of the fine-tune is carried. A tensor that the base has unchanged has no spec at all."""

    codec: Literal["onebit", "whole"]
    shape: Annotated[list[Size], Field(max_length=MAX_RANK)]  # the fine-tune's own
    axis: Literal["scalar", "out", "in", "both"] | None = None  # onebit: which scales there are
    planes: Annotated[int, Field(ge=1, le=MAX_PLANES)] = 1  # onebit: how many sign planes are added up
    rank: Size = 0  # onebit: of the low-rank residual that is added to them
    added_rows: Size = 0  # onebit: how many last rows the base lacks; they are stored whole
    against: Label | None = (
        None  # onebit: the base tensor that the delta is taken from, where the name differs
    )
    num_zeros: Size = 0  # onebit: differences that were exactly zero
    zeros: Literal["positive", "alternate", "fitted"] | None = None  # onebit: how those were coded
    error: float | None = None  # onebit: Frobenius norm of (delta - coded delta) over that of the delta

    @model_validator(mode="after")
    def _codec_has_its_fields(self) -> TensorSpec:
        if self.codec == "onebit" and (
            self.axis is None or len(self.shape) != 2 or self.added_rows > self.shape[0]
        ):
            raise ValueError(
                "a onebit tensor needs an axis, two dimensions and at most its own number of added rows"
            )
        if self.codec == "onebit" and self.rank > min(self.base_rows, self.shape[1]):
            raise ValueError(f"a residual of rank {self.rank} is larger than its matrix")
        if self.codec == "whole" and (
            self.axis is not None
            or self.planes > 1
            or self.rank
            or self.added_rows
            or self.against is not None
        ):
            raise ValueError(
                "a whole tensor has no axis, planes, rank or added rows, and nothing to be against"
            )
        return self

    @property
    def base_rows(self) -> int:
        """Rows that are coded against the base."""
        return self.shape[0] - self.added_rows


class Manifest(_Strict):
    """Everything about an artifact that is not tensor bytes."""

    base_id: Label
    base_fingerprint: Digest
    method: Literal["scalar", "per-axis", "both"]
    tied: bool  # the output head is the input embedding
    device_bytes: Size  # the data section up to here goes to the device; the variant's files follow
    config: Facts  # the architecture's facts, which a delta cannot carry and the base must share
    tensors: dict[str, TensorSpec]
    files: Annotated[list[Filename], Field(max_length=len(FILES))]
    compressor: Facts  # version and settings
    fidelity: Facts

    def to_metadata(self) -> dict[str, str]:
        fields = self.model_dump(exclude_defaults=True)
        text = json.dumps(fields, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return {FORMAT_KEY: str(FORMAT), MANIFEST_KEY: text}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str], where: str) -> Manifest:
        """Parse a header's metadata; anything unexpected is an ArtifactError."""
        _check_format(metadata, where)
        where = f"{where}: manifest"
        document = parse_json(metadata[MANIFEST_KEY], where)
        if isinstance(document, dict) and isinstance(specs := document.get("tensors"), dict):
            # One by one, because the library would first collect the defects of all of them.
            document["tensors"] = {
                name: _parse(TensorSpec, spec, where, name) for name, spec in specs.items()
            }
        return _parse(cls, document, where)

    @classmethod
    def from_verified_metadata(cls, metadata: Mapping[str, str], where: str) -> Manifest:
        """The manifest of an artifact that `from_metadata` has accepted before: parsed, and little is checked.

        Raises:
            ArtifactError: it was accepted by another version of Peraxis.
        """
        _check_format(metadata, where)
        try:
            return cls.model_validate_json(metadata[MANIFEST_KEY])
        except ValidationError as error:
            raise ArtifactError(f"{where}: its manifest is one of another version: compress again") from error


def _check_format(metadata: Mapping[str, str], where: str) -> None:
    if FORMAT_KEY not in metadata or MANIFEST_KEY not in metadata:
        raise ArtifactError(
            f"{where}: a safetensors file but no Peraxis artifact; make one with `peraxis compress`"
        )
    if metadata[FORMAT_KEY] != str(FORMAT):
        raise ArtifactError(
            f"{where}: artifact format {shown(metadata[FORMAT_KEY])}, and this version of Peraxis reads "
            f"format {FORMAT}: update it, or compress again with it"
        )


def _parse(model: type[_Parsed], value: Any, where: str, tensor: str | None = None) -> _Parsed:
    """One object of the document, `tensor`'s or the whole, or an ArtifactError with its first defect."""

    def bad(what: str) -> ArtifactError:
        return ArtifactError(
            f"{where}: {what}" if tensor is None else f"{where}: tensor {shown(tensor)}: {what}"
        )

    if not isinstance(value, dict):
        raise bad("it is no JSON object")
    if unknown := sorted(value.keys() - model.model_fields.keys()):
        raise bad(f"it has the unknown field {shown(unknown[0])}")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = "".join(f"{part}: " for part in first["loc"])
        raise bad(f"{place}{first['msg']}") from error
