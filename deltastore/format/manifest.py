"""The manifest of an artifact: its base, the codec of every tensor, the compressor's settings and measured fidelity.

It is stored as JSON in the file's safetensors metadata and parsed strictly, because artifacts are untrusted. Beside it
stand the parts of a coded matrix, generic in what stands for one (a tensor name, a header entry or a tensor), and the
names of the tensors in an artifact's file. Must not know tensor bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from deltastore.errors import ArtifactError, shown
from deltastore.format.files import GENERATION_FILE, MAX_FILES, is_tokenizer_file
from deltastore.format.header import (
    MAX_JSON_VALUES,
    MAX_NAME_CHARS,
    MAX_RANK,
    RAW_VALUES,
    num_values,
    parse_json,
)

# The format that holds stacks of experts. An artifact without any is written in format 1, which older readers take.
FORMATS = ("1", "2")
FORMAT_KEY = "peraxis.format"
MANIFEST_KEY = "peraxis.manifest"

MAX_FACTS_BYTES = 256 << 10
MAX_FACTS_DEPTH = 16
MAX_PLANES = 4
MAX_EXPERTS = 4096  # of a stack


def _small(facts: dict[str, Any]) -> dict[str, Any]:
    """Refuse free-form JSON that is deep or long: it is kept in version records and sent in replies."""
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
    if name != GENERATION_FILE and not is_tokenizer_file(name):
        raise ValueError(f"{shown(name)} is not one of the files that an artifact may carry")
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
    """The codec of one tensor of the fine-tune. A tensor that equals the base's has no spec."""

    codec: Literal["onebit", "whole", "stack"]
    shape: Annotated[list[Size], Field(max_length=MAX_RANK)]  # the fine-tune's own
    # All fields below belong to the codec `onebit`; `transposed` to `stack`, which also has `axis`, zeros and error.
    axis: Literal["scalar", "out", "in", "both"] | None = None  # its scale vectors
    planes: Annotated[int, Field(ge=1, le=MAX_PLANES)] = 1  # number of sign planes
    rank: Size = 0  # of the low-rank residual; 0 if there is none
    added_rows: Size = 0  # number of last rows that the base lacks; they are stored whole
    against: Label | None = None  # the base tensor that the delta is taken from, if its name differs
    num_zeros: Size = 0  # number of differences that are exactly zero
    zeros: Literal["positive", "alternate", "fitted"] | None = None  # how their signs were chosen
    error: float | None = None  # Frobenius norm of (delta - coded delta) over that of the delta
    transposed: bool = False  # the experts are stored as [experts, in, out] and not as [experts, out, in]

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
        of_matrices = self.planes > 1 or self.rank or self.added_rows or self.against is not None
        if self.codec == "whole" and (self.axis is not None or of_matrices):
            raise ValueError(
                "a whole tensor has no axis, planes, rank or added rows, and nothing to be against"
            )
        if self.codec == "stack" and (self.axis is None or len(self.shape) != 3 or of_matrices):
            raise ValueError(
                "a stack needs an axis and three dimensions, and has no further planes, rank or added rows, and "
                "nothing to be against"
            )
        if self.codec == "stack" and self.shape[0] > MAX_EXPERTS:
            raise ValueError(f"a stack of {self.shape[0]} experts is more than the {MAX_EXPERTS} allowed")
        if self.transposed and self.codec != "stack":
            raise ValueError("only a stack of experts is transposed")
        return self

    @property
    def base_rows(self) -> int:
        """The number of rows that are coded against the base's."""
        return self.shape[0] - self.added_rows

    @property
    def features(self) -> tuple[int, int]:
        """The output and the input features of a coded matrix, or of each matrix of a stack."""
        rows = self.base_rows if self.codec == "onebit" else self.shape[1]
        columns = self.shape[-1]
        return (columns, rows) if self.transposed else (rows, columns)


KEY_END = b'":'
QUOTES_BEFORE_SPACE = (b'" ', b'"\t', b'"\n', b'"\r')
NUM_SPEC_FIELDS = len(TensorSpec.model_fields)


class Manifest(_Strict):
    """All facts about an artifact beside its tensor bytes."""

    base_id: Label
    base_fingerprint: Digest
    method: Literal["scalar", "per-axis", "both"]
    tied: bool  # the output head is the input embedding
    # Bytes of the device section, with which the data section begins; the variant's files follow.
    device_bytes: Size
    config: Facts  # as `deltastore.base.architecture` returns it; the base's must agree
    tensors: dict[str, TensorSpec]
    files: Annotated[list[Filename], Field(max_length=MAX_FILES)]
    compressor: Facts  # version and settings
    fidelity: Facts

    @property
    def stacks(self) -> list[str]:
        """The names of the stacks of experts."""
        return [name for name, spec in self.tensors.items() if spec.codec == "stack"]

    @property
    def format(self) -> str:
        """The lowest format number that describes the artifact."""
        return FORMATS[1] if self.stacks else FORMATS[0]

    def to_metadata(self) -> dict[str, str]:
        fields = self.model_dump(exclude_defaults=True)
        text = json.dumps(fields, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return {FORMAT_KEY: self.format, MANIFEST_KEY: text}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str], where: str) -> Manifest:
        """Parse a header's metadata.

        Raises:
            ArtifactError: It is of another format version, or its first defect.
        """
        _check_format(metadata, where)
        claimed, where = metadata[FORMAT_KEY], f"{where}: manifest"
        text = metadata[MANIFEST_KEY]
        document, specs = _common_form(text, where) or _any_form(text, where)
        # Afterwards, because pydantic would check them again.
        manifest = _parse(cls, document, where).model_copy(update={"tensors": specs})
        if manifest.format != claimed:
            held = f"{len(manifest.stacks)} stacks of experts" if manifest.stacks else "no stack of experts"
            raise ArtifactError(f"{where}: it says format {claimed} and holds {held}: compress again")
        return manifest

    @classmethod
    def from_verified_metadata(cls, metadata: Mapping[str, str], where: str) -> Manifest:
        """Parse the manifest of an artifact that `from_metadata` accepted when it was published.

        Raises:
            ArtifactError: It was accepted by another version of Peraxis.
        """
        _check_format(metadata, where)
        try:
            return cls.model_validate_json(metadata[MANIFEST_KEY])
        except ValidationError as error:
            raise ArtifactError(
                f"{where}: its manifest was written by another version of Peraxis: compress again"
            ) from error


def _check_format(metadata: Mapping[str, str], where: str) -> None:
    if FORMAT_KEY not in metadata or MANIFEST_KEY not in metadata:
        raise ArtifactError(
            f"{where}: a safetensors file but not a Peraxis artifact; make one with `peraxis compress`"
        )
    if metadata[FORMAT_KEY] not in FORMATS:
        raise ArtifactError(
            f"{where}: artifact format {shown(metadata[FORMAT_KEY])}, and this version of Peraxis reads "
            f"formats {' and '.join(FORMATS)}: update it, or compress again with it"
        )


_RAW_SPECS = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_SPECS = TypeAdapter(Annotated[list[TensorSpec], FailFast()])


def _common_form(text: str, where: str) -> tuple[Any, dict[str, TensorSpec]] | None:
    """Read a manifest as `to_metadata` writes it, without spaces and escapes, in half of the time of `_any_form`.

    Returns the manifest without its tensors, and these.

    None for every manifest of whose tensors it is not sure; `_any_form` reads it or names its defect. msgspec keeps the
    last of equal keys, so they are found by counting: without escapes and spaces, each key and nothing else ends with a
    quote and a colon.

    Raises:
        ArtifactError: what stands beside the tensors is not allowed.
    """
    if "\\" in text or num_values(text) > MAX_JSON_VALUES:
        return None
    try:
        raw = text.encode()
        if any(quote in raw for quote in QUOTES_BEFORE_SPACE):
            return None
        values = {name: bytes(value) for name, value in RAW_VALUES.decode(raw).items()}
        num_keys = len(values) + sum(value.count(KEY_END) for value in values.values())
        own = values.pop("tensors")
        tensors = RAW_VALUES.decode(own)
        fields = b"[%b]" % b",".join(tensors.values())
        sizes = [len(spec) for spec in _RAW_SPECS.decode(fields)]
        # Pydantic would collect every unknown field.
        if max(sizes, default=0) > NUM_SPEC_FIELDS or (num_keys, len(tensors) + sum(sizes)) != (
            raw.count(KEY_END),
            own.count(KEY_END),
        ):
            return None
        specs = dict(zip(tensors, _SPECS.validate_json(fields), strict=True))
    except (msgspec.MsgspecError, ValidationError, UnicodeError, KeyError, RecursionError):
        return None
    others = b",".join(b'"%b":%b' % (name.encode(), value) for name, value in values.items())
    return {**parse_json(b"{%b}" % others, where), "tensors": {}}, specs


def _any_form(text: str, where: str) -> tuple[Any, dict[str, TensorSpec]]:
    document, specs = parse_json(text, where), {}
    if isinstance(document, dict) and isinstance(document.get("tensors"), dict):
        # One by one, because pydantic would first collect the defects of all of them.
        specs = {name: _spec(spec, where, name) for name, spec in document["tensors"].items()}
        document["tensors"] = {}
    return document, specs


def _spec(value: Any, where: str, tensor: str) -> TensorSpec:
    # Pydantic would collect every unknown field.
    if isinstance(value, dict) and len(value) <= NUM_SPEC_FIELDS:
        with suppress(ValidationError):
            return TensorSpec.model_validate(value)
    # Again, for its first defect.
    return _parse(TensorSpec, value, where, tensor)


def _parse(model: type[_Parsed], value: Any, where: str, tensor: str | None = None) -> _Parsed:
    """Parse one object, the whole manifest or the spec of `tensor`; raise ArtifactError with its first defect."""

    def bad(what: str) -> ArtifactError:
        return ArtifactError(
            f"{where}: {what}" if tensor is None else f"{where}: tensor {shown(tensor)}: {what}"
        )

    if not isinstance(value, dict):
        raise bad("it is not a JSON object")
    if unknown := sorted(value.keys() - model.model_fields.keys()):
        raise bad(f"it has the unknown field {shown(unknown[0])}")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = "".join(f"{part}: " for part in first["loc"])
        raise bad(f"{field}{first['msg']}") from error


T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class PlaneParts(Generic[T]):
    """The parts of one sign plane."""

    signs: T
    scale_out: T | None
    scale_in: T | None
    gain: T

    def all(self) -> list[T]:
        """The parts that are present, in file order."""
        return _present((self.signs, self.scale_out, self.scale_in, self.gain))

    def scales(self) -> list[T]:
        """The scale vectors that are present."""
        return _present((self.scale_out, self.scale_in))

    def map(self, change: Callable[[T], U]) -> PlaneParts[U]:
        """Apply a function to every part that is present."""
        return PlaneParts(
            change(self.signs),
            None if self.scale_out is None else change(self.scale_out),
            None if self.scale_in is None else change(self.scale_in),
            change(self.gain),
        )


@dataclass(frozen=True, slots=True)
class MatrixParts(Generic[T]):
    """The parts of a coded matrix."""

    planes: tuple[PlaneParts[T], ...]
    left: T | None
    right: T | None
    added: T | None

    def all(self) -> list[T]:
        """The parts that are present, in file order."""
        return [
            *(part for plane in self.planes for part in plane.all()),
            *self.residual(),
            *self.added_rows(),
        ]

    def residual(self) -> list[T]:
        """Both factors of the low-rank residual; empty if there is none."""
        return _present((self.left, self.right))

    def added_rows(self) -> list[T]:
        """The rows that the base lacks; empty if there are none."""
        return _present((self.added,))

    def map(self, change: Callable[[T], U]) -> MatrixParts[U]:
        """Apply a function to every part that is present."""
        return MatrixParts(
            tuple(plane.map(change) for plane in self.planes),
            None if self.left is None else change(self.left),
            None if self.right is None else change(self.right),
            None if self.added is None else change(self.added),
        )


def part_names(name: str, spec: TensorSpec) -> MatrixParts[str]:
    """Return the names of the tensors that a coded matrix, or a stack of them, is stored as."""
    assert spec.axis is not None
    return MatrixParts(
        tuple(_plane_names(name if k == 0 else f"{name}.plane{k}", spec.axis) for k in range(spec.planes)),
        f"{name}.left" if spec.rank else None,
        f"{name}.right" if spec.rank else None,
        f"{name}.added" if spec.added_rows else None,
    )


def file_tensor(filename: str) -> str:
    """Return the name of the tensor that holds one of the variant's files."""
    return f"file.{filename}"


def padding_tensor(index: int) -> str:
    """Return the name of the tensor that pads up to the next aligned one; safetensors allows no holes."""
    return f"padding.{index}"


def _plane_names(prefix: str, axis: str) -> PlaneParts[str]:
    return PlaneParts(
        f"{prefix}.signs",
        f"{prefix}.scale_out" if axis != "in" else None,
        f"{prefix}.scale_in" if axis in ("in", "both") else None,
        f"{prefix}.gain",
    )


def _present(parts: Sequence[T | None]) -> list[T]:
    return [part for part in parts if part is not None]
