"""Untrusted files: every hostile file is refused with its own error, and no file raises anything but a PeraxisError."""

from __future__ import annotations

import json
import os
import random
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deltastore.errors import ArtifactError, ArtifactTooLarge
from deltastore.format.artifact import COPY_BYTES, Artifact, ArtifactWriter
from deltastore.format.header import (
    MAX_HEADER_BYTES,
    MAX_JSON_VALUES,
    Header,
    TensorEntry,
    parse_json,
    read_header,
)
from deltastore.format.layout import MAX_FILE_BYTES, check_layout
from deltastore.format.manifest import FORMAT_KEY, MANIFEST_KEY, Manifest, TensorSpec
from deltastore.format.matrix import MatrixDelta, SignPlane
from deltastore.format.validate import check_artifact, check_size
from tests.deltastore.helpers.hostile import (
    HEADERS,
    Hostile,
    assert_is_refused,
    assert_is_valid_or_refused,
    read_all,
    take_apart,
    with_header,
    with_manifest,
    with_manifest_text,
)
from tests.deltastore.helpers.hostile_artifacts import BASES, LAYOUTS, NUMBERS, with_head
from tests.deltastore.helpers.hostile_manifests import MANIFESTS
from tests.deltastore.helpers.hostile_planes import PLANES, RESIDUALS
from tests.helpers.tiny_artifact import BOTH, tiny_manifest, write_tiny
from tests.helpers.tiny_planes import write_planes

HOSTILE = [*HEADERS, *MANIFESTS, *LAYOUTS, *NUMBERS, *BASES]
NASTY: list[Any] = [
    None,
    True,
    -1,
    0,
    0.5,
    2**40,
    2**62,
    10**19,
    "",
    "x",
    "\0",
    "U8",
    "F64",
    [],
    {},
    [[]],
    [1, 2],
    {"a": []},
]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "tiny.safetensors"
    write_tiny(path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def planes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("planes") / "tiny.safetensors"
    write_planes(path)
    return path.read_bytes()


@pytest.fixture(params=["good", "planes"])
def each(request: pytest.FixtureRequest) -> bytes:
    """Run the test with either artifact."""
    raw: bytes = request.getfixturevalue(request.param)
    return raw


def test_a_good_artifact_passes(each: bytes, tmp_path: Path) -> None:
    assert not assert_is_valid_or_refused(tmp_path / "a", each)


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda hostile: hostile.name)
def test_a_hostile_file_is_refused_with_its_own_error(hostile: Hostile, good: bytes, tmp_path: Path) -> None:
    assert_is_refused(tmp_path / "a", hostile, good)


@pytest.mark.parametrize("hostile", [*PLANES, *RESIDUALS], ids=lambda hostile: hostile.name)
def test_hostile_planes_and_residuals_are_refused_with_their_own_error(
    hostile: Hostile, planes: bytes, tmp_path: Path
) -> None:
    assert_is_refused(tmp_path / "a", hostile, planes)


def test_an_output_head_of_its_own_fits_a_tied_base(good: bytes, tmp_path: Path) -> None:
    assert not assert_is_valid_or_refused(tmp_path / "a", with_head(8, tied=False)(good))


def test_a_fact_that_only_one_configuration_states_is_no_mismatch(good: bytes, tmp_path: Path) -> None:
    raw = with_manifest(lambda manifest: manifest["config"].update(new_in_next_version=1))(good)
    assert not assert_is_valid_or_refused(tmp_path / "a", raw)


def test_a_fidelity_report_may_nest_as_deep_as_allowed(good: bytes, tmp_path: Path) -> None:
    raw = with_manifest_text(lambda text: text.replace("0.25", "[" * 15 + "1" + "]" * 15))(good)
    assert not assert_is_valid_or_refused(tmp_path / "a", raw)


def test_metadata_of_others_is_ignored(good: bytes, tmp_path: Path) -> None:
    raw = with_header(lambda header: header["__metadata__"].update(format="pt"))(good)
    assert not assert_is_valid_or_refused(tmp_path / "a", raw)


def test_a_delta_larger_than_a_slot_is_too_large(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(good)
    with Artifact.open(path) as artifact:
        check_size(artifact, 320)
        with pytest.raises(ArtifactTooLarge, match="needs 320 bytes on the device and a slot has 319"):
            check_size(artifact, 319)


def test_a_file_of_a_variant_may_not_be_larger_than_allowed() -> None:
    length = MAX_FILE_BYTES + 1
    header = Header({"file.vocab.txt": TensorEntry("file.vocab.txt", "U8", (length,), 0, length)}, {}, 4096)
    manifest = tiny_manifest(0).model_copy(update={"tensors": {}, "files": ["vocab.txt"]})
    with pytest.raises(ArtifactError, match=f"has {length} bytes, more than the {MAX_FILE_BYTES} allowed"):
        check_layout(header, manifest, "upload")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.mkdir(), "not a regular file"),
        (lambda path: os.mkfifo(path), "not a regular file"),
        (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
        (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    ],
    ids=["nothing", "directory", "pipe", "link to itself", "endless device"],
)
def test_what_is_no_regular_file_is_refused(make: Callable[[Path], None], says: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    make(path)
    with pytest.raises(ArtifactError, match=f"upload: {says}"):
        read_all(path)


def test_a_path_with_nul_is_refused() -> None:
    with pytest.raises(ArtifactError, match="null byte"):
        Artifact.open(Path("a\0b"))


def test_a_refused_file_is_closed_again(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(good[:-1])
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ArtifactError):
        Artifact.open(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_shrinks_after_it_was_opened_is_truncated(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(good)
    with Artifact.open(path) as artifact:
        os.truncate(path, 4100)
        with pytest.raises(ArtifactError, match="truncated: it ends 12 bytes before byte 4124"):
            check_artifact(artifact)


def test_an_unchecked_gain_is_refused_when_it_is_read(good: bytes, tmp_path: Path) -> None:
    hostile = next(hostile for hostile in NUMBERS if hostile.name == "gain 3.0")
    path = tmp_path / "a"
    path.write_bytes(hostile.change(good))
    name = "model.layers.0.self_attn.k_proj.weight"
    with Artifact.open(path) as artifact, pytest.raises(ArtifactError, match="is not a power of two"):
        artifact.onebit(name)


def test_json_of_too_many_values_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(
        ArtifactError, match=f"config: its JSON cannot be read: more than {MAX_JSON_VALUES} val"
    ):
        parse_json("[" * (MAX_JSON_VALUES + 1), "config")


def test_a_header_may_be_large_only_in_a_large_file(tmp_path: Path) -> None:
    path, length = tmp_path / "a", MAX_HEADER_BYTES + 1
    path.write_bytes(struct.pack("<Q", length))
    os.truncate(path, 40 * MAX_HEADER_BYTES)  # sparse
    with pytest.raises(
        ArtifactError, match=f"claims {length} bytes, more than the {MAX_HEADER_BYTES} allowed"
    ):
        read_all(path)


ENTRY = '{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'


def one(old: str, new: str) -> str:
    """Return a header of one tensor with a part of its value replaced."""
    assert old in ENTRY
    return f'{{"a":{ENTRY.replace(old, new, 1)}}}'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (one("", ""), None),
        (f'{{"a" : {ENTRY} }}', None),
        (f'{{"\\u0061":{ENTRY}}}', None),
        (one("[4]", "[4 ]"), None),
        (one("shape", "\\u0073hape"), None),
        (one("[4]", "[4,1,1]"), None),
        (f'{{"a":{ENTRY},"b":{ENTRY.replace("[4]", "[4,0]").replace("0,4", "4,4")}}}', None),
        (f'{{"a":{ENTRY},"a":{ENTRY}}}', "key 'a' stands twice"),
        (f'{{"a":{ENTRY},"\\u0061":{ENTRY}}}', "key 'a' stands twice"),
        (f'{{"__metadata__":{{}},"a":{ENTRY},"__metadata__":{{}}}}', "key '__metadata__' stands twice"),
        (f'{{"__metadata__":{{"k":"","k":""}},"a":{ENTRY}}}', "key 'k' stands twice"),
        (one("]}", '],"dtype":"U8"}'), "key 'dtype' stands twice"),
        (one("]}", '],"dtype" :"U8"}'), "key 'dtype' stands twice"),
        (one("]}", '],"\\u0064type":"U8"}'), "key 'dtype' stands twice"),
        (one("]}", '],"shape":[4]}'), "key 'shape' stands twice"),
        (one("]}", '],"order":1}'), "needs exactly dtype, shape and data_offsets"),
        (one("4]", "4.0]"), "malformed shape"),
        (one("[0", "[-1"), "malformed data_offsets"),
        (one("U8", "dtype"), "unknown dtype 'dtype'"),
        (one("[4]", "[5]"), "does not fill its 4 bytes"),
        (one("[4]", f"[{2**61},{2**61},0]").replace("0,4", "0,0"), "malformed shape"),
        (one("[4]", f"[4{',1' * 8}]"), "malformed shape"),
        (one("[4]", f"[{'9' * 21}]"), "is not allowed"),
        (f'{{"":{ENTRY}}}', "is not 1 to 512 characters"),
        ('{"%s":%s}' % ("a" * 513, ENTRY), "is not 1 to 512 characters"),  # noqa: UP031
        (f'{{"\u202e":{ENTRY}}}', "is not 1 to 512 characters"),
        (f'{{"__metadata__":{{"k":"\\ud800"}},"a":{ENTRY}}}', "surrogates not allowed"),
        (f'{{"__metadata__":{{"k":1}},"a":{ENTRY}}}', "must map names to strings"),
        (f'{{"__metadata__":7,"a":{ENTRY}}}', "must map names to strings"),
        (one("", "") + "\x0b", "JSON cannot be read"),
        (one("", "") + ",", "JSON cannot be read"),
    ],
)
def test_a_header_is_read_alike_in_every_way_of_writing_it(
    text: str, says: str | None, tmp_path: Path
) -> None:
    """Most headers are written without spaces and escapes, and are read in another way than the rest."""
    raw = text.encode()
    path = tmp_path / "a"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(4 if "0,0" not in text else 0))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if says is None:
            entries = read_header(descriptor, "upload").tensors
            assert entries["a"].num_bytes == 4
            assert entries["a"].shape[0] == 4
        else:
            with pytest.raises(ArtifactError, match=says):
                read_header(descriptor, "upload")
    finally:
        os.close(descriptor)


SPEC = '{"codec":"whole","shape":[4]}'
REST = tiny_manifest(0).model_dump(exclude={"tensors"})


def of_tensors(tensors: str, **others: Any) -> str:
    """Return the text of a manifest with these tensors."""
    own = json.dumps({**REST, **others}, separators=(",", ":"))
    return f'{own[:-1]},"tensors":{tensors}}}'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (of_tensors(f'{{"a":{SPEC}}}'), None),
        (of_tensors(f'{{"a" : {SPEC}}}'), None),
        (of_tensors(f'{{"\\u0061":{SPEC}}}'), None),
        (of_tensors(f'{{"a":{SPEC}}}').replace("[4]", "[4 ]"), None),
        (of_tensors(f'{{"a":{SPEC}}}').replace("codec", "\\u0063odec"), None),
        (of_tensors(f'{{"a":{SPEC}}}', fidelity={'a"': {"b": ':"'}}), None),
        (of_tensors(f'{{"a":{SPEC},"a":{SPEC}}}'), "key 'a' stands twice"),
        (of_tensors(f'{{"a":{SPEC},"\\u0061":{SPEC}}}'), "key 'a' stands twice"),
        (of_tensors(f'{{"a":{SPEC}}},"tensors":{{"a":{SPEC}}}'), "key 'tensors' stands twice"),
        (of_tensors(f'{{"a":{SPEC}}},"tensors" :{{"a":{SPEC}}}'), "key 'tensors' stands twice"),
        (of_tensors(f'{{"a":{SPEC}}},"tied":false'), "key 'tied' stands twice"),
        (of_tensors(f'{{"a":{SPEC}}}').replace("]}", '],"codec":"whole"}'), "key 'codec' stands twice"),
        (of_tensors(f'{{"a":{SPEC}}}').replace("]}", '],"codec" :"whole"}'), "key 'codec' stands twice"),
        (
            of_tensors(f'{{"a":{SPEC}}}', config={}).replace('config":{', 'config":{"b":{"a":1,"a":1}'),
            "key 'a' stands",
        ),
        (of_tensors(f'{{"a":{SPEC}}}').replace("]}", '],"own":1}'), "'a': it has the unknown field 'own'"),
        (
            of_tensors(f'{{"a":{SPEC},"b":{{"codec":"other"}}}}'),
            "'b': codec: Input should be 'onebit', 'whole'",
        ),
        (
            of_tensors(f'{{"a":{SPEC}}}').replace("[4]", "[4.0]"),
            "'a': shape: 0: Input should be a valid integer",
        ),
        (of_tensors(f'{{"a":{SPEC}}}').replace("]}", '],"error":NaN}'), "the number 'NaN' is not allowed"),
        (
            of_tensors(f'{{"a":{SPEC}}}').replace("]}", '],"error":1e999}'),
            "the number '1e999' is not allowed",
        ),
        (
            of_tensors(f'{{"a":{SPEC}}}').replace("]}", '],"rank":1}'),
            "'a': Value error, a whole tensor has no axis",
        ),
        (of_tensors('{"a":7}'), "'a': it is not a JSON object"),
        (of_tensors("[]"), "tensors: Input should be a valid dictionary"),
        (of_tensors("{}", own=1), "it has the unknown field 'own'"),
        (json.dumps(REST), "tensors: Field required"),
        (of_tensors("{}") + ",", "JSON cannot be read"),
        ("7", "it is not a JSON object"),
    ],
)
def test_a_manifest_is_read_alike_in_every_way_of_writing_it(text: str, says: str | None) -> None:
    """Most manifests are written without spaces and escapes, and are read in another way than the rest."""
    metadata = {FORMAT_KEY: "1", MANIFEST_KEY: text}
    if says is None:
        manifest = Manifest.from_metadata(metadata, "upload")
        assert manifest.tensors == {"a": TensorSpec(codec="whole", shape=[4])}
        assert Manifest.from_metadata(manifest.to_metadata(), "upload") == manifest
    else:
        with pytest.raises(ArtifactError, match=f"upload: manifest: .*{re.escape(says)}") as caught:
            Manifest.from_metadata(metadata, "upload")
        assert "\n" not in str(caught.value)


def test_every_truncation_is_refused(each: bytes, tmp_path: Path) -> None:
    for length in [*range(0, len(each), 37), len(each) - 1]:
        assert assert_is_valid_or_refused(tmp_path / "a", each[:length]), length


def test_random_changes_of_bytes_are_refused_or_harmless(each: bytes, tmp_path: Path) -> None:
    chance = random.Random(0)
    header_end = len(each) - len(take_apart(each)[1]) - each[8:4096].count(b"  ")
    num_refused = 0
    for _ in range(2000):
        raw = bytearray(each)
        for _ in range(chance.choice((1, 1, 2, 8))):
            end = chance.choice((8, header_end, len(raw)))
            raw[chance.randrange(end)] = chance.choice((chance.randrange(256), *b'0129"\\,:[]{}-e'))
        num_refused += assert_is_valid_or_refused(tmp_path / "a", bytes(raw))
    assert 1000 < num_refused < 2000


def test_random_values_in_the_json_are_refused_or_harmless(each: bytes, tmp_path: Path) -> None:
    chance = random.Random(0)
    num_refused = 0
    for _ in range(1500):
        choose = with_manifest if chance.random() < 0.5 else with_header

        def spoil(document: dict[str, Any]) -> None:
            place, key = chance.choice(list(places(document)))
            if chance.random() < 0.2:
                place.pop(key)
            elif chance.random() < 0.2 and isinstance(place, dict):
                place[str(chance.choice(NASTY))] = place.pop(key)
            else:
                place[key] = chance.choice(NASTY)

        num_refused += assert_is_valid_or_refused(tmp_path / "a", choose(spoil)(each))
    assert 1000 < num_refused < 1500


def places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container of a document with each of its keys, except `__metadata__`, whose values are text."""
    for key in list(document) if isinstance(document, dict) else range(len(document)):
        if key == "__metadata__":
            continue
        yield document, key
        if isinstance(document[key], dict | list):
            yield from places(document[key])


def test_pad_bits_are_found_in_rows_that_lie_across_the_pieces_a_mask_is_read_in(tmp_path: Path) -> None:
    width, in_features = 61, 487  # one pad bit in each row's last byte
    num_rows = 2 * COPY_BYTES // width + 2
    signs = torch.zeros(num_rows, width, dtype=torch.uint8)
    spec = TensorSpec(codec="onebit", shape=[num_rows, in_features], axis="scalar")
    for rows in ([], [COPY_BYTES // width], [COPY_BYTES // width, 2 * COPY_BYTES // width, num_rows - 1]):
        signs[:, -1] = 0
        signs[rows, -1] = 0x80
        with ArtifactWriter(tmp_path / "wide") as writer:
            plane = SignPlane(signs, in_features, 1.0, scale_out=torch.ones(1, dtype=torch.float16))
            writer.add_onebit(BOTH, MatrixDelta((plane,)))
            none = {"tensors": {BOTH: spec}, "files": []}
            writer.finish(tiny_manifest(writer.device_bytes).model_copy(update=none))
        with Artifact.open(tmp_path / "wide") as artifact:
            if not rows:
                check_artifact(artifact)
                continue
            with pytest.raises(ArtifactError, match=f"{len(rows)} rows of tensor .* have pad bits set"):
                check_artifact(artifact)
