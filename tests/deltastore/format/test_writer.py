"""Writing an artifact: all or nothing, and always a file that the reader accepts."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from deltastore.errors import ArtifactError, CheckpointError, StorageFull, UsageError
from deltastore.format.artifact import Artifact, ArtifactWriter
from deltastore.format.header import parse_verified_header
from deltastore.format.manifest import FORMAT_KEY, MANIFEST_KEY, Manifest, TensorSpec
from deltastore.format.matrix import MatrixDelta, SignPlane, pack_signs
from deltastore.format.sizes import one_bit_plan
from deltastore.format.validate import check_artifact
from tests.helpers.tiny_artifact import BASE, NORM, norm, tiny_manifest, write_tiny
from tests.helpers.tiny_planes import write_planes
from tests.helpers.tiny_stacks import write_stacks


def manifest_of(specs: dict[str, TensorSpec], device_bytes: int, files: tuple[str, ...] = ()) -> Manifest:
    update = {"tensors": specs, "device_bytes": device_bytes, "files": list(files)}
    return tiny_manifest(0).model_copy(update=update)


def test_an_artifact_may_carry_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with ArtifactWriter(path) as writer:
        writer.finish(manifest_of({}, 0))
    with Artifact.open(path) as artifact:
        check_artifact(artifact)
        assert (artifact.size_bytes, artifact.header.data_bytes) == (4096, 0)


def test_a_file_of_a_variant_may_be_empty(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with ArtifactWriter(path) as writer:
        writer.add_file("vocab.txt", b"")
        writer.add_file("merges.txt", b"a b")
        writer.finish(manifest_of({}, 0, ("vocab.txt", "merges.txt")))
    with Artifact.open(path) as artifact:
        assert (artifact.file("vocab.txt"), artifact.file("merges.txt")) == (b"", b"a b")


def test_a_tensor_may_lie_in_memory_in_any_order(tmp_path: Path) -> None:
    path, tensor = tmp_path / "a", torch.arange(6.0).view(2, 3).T
    with ArtifactWriter(path) as writer:
        writer.add_whole("a", tensor)
        writer.finish(manifest_of({"a": TensorSpec(codec="whole", shape=[3, 2])}, 32))
    with Artifact.open(path) as artifact:
        assert torch.equal(artifact.whole("a"), tensor)


def test_a_plan_gives_the_bytes_that_the_writer_needs(tmp_path: Path) -> None:
    shapes = {"a.weight": (5, 13), "b.weight": (1, 7), "c.bias": (9,), "d.weight": (3, 64)}
    specs = {}
    with ArtifactWriter(tmp_path / "a") as writer:
        for name, shape in shapes.items():
            if len(shape) == 2 and min(shape) > 1:
                signs, ones = pack_signs(torch.ones(shape)), [torch.ones(size) for size in shape]
                writer.add_onebit(name, MatrixDelta((SignPlane.from_scales(signs, shape[1], *ones),)))
                specs[name] = TensorSpec(codec="onebit", shape=list(shape), axis="both")
            else:
                writer.add_whole(name, torch.ones(shape, dtype=torch.float16))
                specs[name] = TensorSpec(codec="whole", shape=list(shape))
        writer.finish(manifest_of(specs, writer.device_bytes))
    with Artifact.open(tmp_path / "a") as artifact:
        assert artifact.manifest.device_bytes == one_bit_plan(shapes).device_bytes


def test_an_8b_llama_is_16_times_smaller() -> None:
    layer = {"q": (4096, 4096), "k": (1024, 4096), "v": (1024, 4096), "o": (4096, 4096)}
    layer |= {"gate": (14336, 4096), "up": (14336, 4096), "down": (4096, 14336)}
    shapes: dict[str, tuple[int, ...]] = {}
    shapes |= {f"layers.{i}.{name}": shape for i in range(32) for name, shape in layer.items()}
    shapes |= {f"layers.{i}.norm{j}": (4096,) for i in range(32) for j in range(2)} | {"norm": (4096,)}
    shapes |= {"embed_tokens.weight": (128256, 4096), "lm_head.weight": (128256, 4096)}
    plan, whole = one_bit_plan(shapes), one_bit_plan(shapes, embeddings=False)
    assert round(plan.device_bytes / 1e9, 2) == 1.01
    assert round(plan.ratio, 1) == 15.9
    assert round(whole.device_bytes / 1e6) == 2980


def test_leaving_without_finish_leaves_nothing(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "a") as writer:
        writer.add_whole(NORM, norm())
    assert not list(tmp_path.iterdir())


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    delta = MatrixDelta((SignPlane(pack_signs(torch.ones(2, 8)), 8, 1.0, torch.ones(2).half()),))
    with ArtifactWriter(tmp_path / "a") as writer:
        writer.add_whole("a.gain", torch.ones(1))
        with pytest.raises(CheckpointError, match=r"two tensors would be called 'a\.gain'"):
            writer.add_onebit("a", delta)


def test_a_directory_that_is_not_there_is_a_wrong_argument(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file or directory: choose another `out`"):
        ArtifactWriter(tmp_path / "nowhere" / "a")


def test_a_disk_that_is_full_at_the_end_leaves_the_old_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    digest = write_tiny(path)

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFull, match="No space left on device: free some space"):
        write_tiny(path)
    with Artifact.open(path) as artifact:
        assert artifact.digest() == digest
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_a_fidelity_report_that_json_cannot_hold_is_refused() -> None:
    fields = {name: getattr(tiny_manifest(0), name) for name in Manifest.model_fields}
    with pytest.raises(ValidationError, match="not JSON compliant"):
        Manifest(**{**fields, "fidelity": {"kl": float("nan")}})


def test_a_manifest_survives_its_own_metadata() -> None:
    manifest = tiny_manifest(320)
    assert Manifest.from_metadata(manifest.to_metadata(), "x") == manifest
    assert manifest.base_fingerprint == BASE.fingerprint


@pytest.mark.parametrize("write", [write_tiny, write_planes, write_stacks])
def test_what_was_accepted_once_is_read_the_same_without_its_checks(
    tmp_path: Path, write: Callable[[Path], object]
) -> None:
    path = tmp_path / "tiny.safetensors"
    write(path)
    with Artifact.open(path) as artifact:
        header = parse_verified_header(path.read_bytes()[: artifact.header.data_start])
        assert header == artifact.header
        assert Manifest.from_verified_metadata(header.metadata, "tiny") == artifact.manifest


@pytest.mark.parametrize("change", [{FORMAT_KEY: "3"}, {MANIFEST_KEY: "{}"}])
def test_what_another_version_accepted_is_refused(change: dict[str, str]) -> None:
    with pytest.raises(ArtifactError, match="compress again"):
        Manifest.from_verified_metadata({**manifest_of({}, 0).to_metadata(), **change}, "old")
