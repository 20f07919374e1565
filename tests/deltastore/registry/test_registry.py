"""The registry without crashes: publication, resolution, deletion, quarantine and refusals."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from deltastore.errors import (
    ArtifactError,
    RegistryUnavailable,
    UsageError,
    VariantNotFound,
    VariantQuarantined,
)
from deltastore.registry import Registry
from tests.deltastore.helpers.buckets import memory_registry
from tests.deltastore.helpers.crash_storage import FACTS, SteppedStorage, artifact, digest_of, push, stored

BAD_NAMES = [
    "",
    ".",
    "..",
    ".hidden",
    "a/b",
    "a\\b",
    "a b",
    "-a",
    "_a",
    "a\n",
    "ä",
    "a\0",
    "a" * 65,
    "../a",
    "a@1",
]


@pytest.fixture
def volume(tmp_path: Path) -> Registry:
    """A registry in a directory, for tests of its files."""
    return Registry(tmp_path / "registry", SteppedStorage())


@pytest.fixture(params=["directory", "bucket"])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Registry:
    """A registry in a directory, and one in a bucket."""
    if request.param == "directory":
        return Registry(tmp_path / "registry", SteppedStorage())
    return memory_registry(tmp_path)


def test_a_published_artifact_is_described_by_its_record(registry: Registry) -> None:
    data = artifact(1, (4 << 20) + 7)
    publication = push(registry, data, "a")
    record = publication.record
    assert (publication.created, publication.active_version) == (True, 1)
    assert (record.tenant, record.name, record.version, record.activate) == ("default", "a", 1, True)
    assert (record.digest, record.size_bytes) == (hashlib.sha256(data).hexdigest(), len(data))
    chunks = (data[: 4 << 20], data[4 << 20 :])
    assert record.chunk_sha256 == tuple(hashlib.sha256(chunk).hexdigest() for chunk in chunks)
    assert (record.data_start, record.device_bytes) == (FACTS.data_start, FACTS.device_bytes)
    assert (record.base_fingerprint, record.method) == (FACTS.base_fingerprint, FACTS.method)
    assert json.loads(registry.report(record)) == FACTS.fidelity
    assert (record.agreement, record.kl) == (0.75, 0.5)
    assert record.created_at.endswith("+00:00")
    assert registry.object_path(record).read_bytes() == data


def test_another_registry_object_on_the_same_directory_sees_the_same_record(volume: Registry) -> None:
    record = push(volume, artifact(1), "a").record
    assert Registry(volume.root).resolve("default", "a") == record


def test_versions_count_from_one_and_the_newest_becomes_active(registry: Registry) -> None:
    assert [push(registry, artifact(seed), "a").active_version for seed in (1, 2, 3)] == [1, 2, 3]
    assert registry.resolve("default", "a").digest == digest_of(3)


def test_a_version_can_be_published_without_becoming_active(registry: Registry) -> None:
    push(registry, artifact(1), "a")
    assert push(registry, artifact(2), "a", activate=False).active_version == 1
    assert registry.resolve("default", "a").version == 1
    assert registry.resolve("default", "a", 2).digest == digest_of(2)


def test_a_variant_without_an_active_version_says_which_can_be_promoted(registry: Registry) -> None:
    push(registry, artifact(1), "a", activate=False)
    with pytest.raises(VariantNotFound, match=r"no active version: promote one of \[1\]"):
        registry.resolve("default", "a")


def test_the_same_bytes_again_return_the_same_version_and_do_not_activate_it(registry: Registry) -> None:
    push(registry, artifact(1), "a")
    push(registry, artifact(2), "a")
    again = push(registry, artifact(1), "a")
    assert (again.record.version, again.created, again.active_version) == (1, False, 2)
    assert len(registry.variant("default", "a").versions) == 2


def test_variants_share_an_object_when_their_bytes_are_equal(volume: Registry) -> None:
    first, second = push(volume, artifact(1), "a"), push(volume, artifact(1), "b")
    assert first.record.digest == second.record.digest
    assert (first.created, second.created) == (True, True)
    assert volume.usage()[:2] == (1, len(artifact(1)))


def test_rolling_back_holds_until_the_next_publication(registry: Registry) -> None:
    for seed in (1, 2):
        push(registry, artifact(seed), "a")
    assert registry.activate("default", "a", 1).version == 1
    assert registry.variant("default", "a").active == 1
    push(registry, artifact(3), "a", activate=False)
    assert registry.variant("default", "a").active == 1
    push(registry, artifact(4), "a")
    assert registry.variant("default", "a").active == 4


def test_the_active_version_cannot_be_deleted_alone(registry: Registry) -> None:
    push(registry, artifact(1), "a")
    with pytest.raises(UsageError, match="version 1 of 'a' is active: promote another, or delete the whole"):
        registry.delete("default", "a", 1)
    assert registry.resolve("default", "a").version == 1


def test_a_deleted_version_is_gone_and_its_number_is_not_used_again(registry: Registry) -> None:
    for seed in (1, 2):
        push(registry, artifact(seed), "a")
    registry.activate("default", "a", 1)
    registry.delete("default", "a", 2)
    for call in (registry.resolve, registry.activate, registry.delete):
        with pytest.raises(VariantNotFound, match="'a' has no version 2"):
            call("default", "a", 2)
    assert push(registry, artifact(2), "a").record.version == 3


def test_a_deleted_variant_is_gone_until_it_is_published_anew(registry: Registry) -> None:
    for seed in (1, 2):
        push(registry, artifact(seed), "a")
    registry.delete("default", "a")
    for call in (registry.resolve, registry.variant, registry.delete):
        with pytest.raises(VariantNotFound, match="no variant 'a'"):
            call("default", "a")
    assert registry.variants() == []
    back = push(registry, artifact(1), "a")
    assert (back.record.version, back.created, back.active_version) == (3, True, 3)


def test_a_record_is_live_until_its_version_or_variant_is_deleted_by_any_server(volume: Registry) -> None:
    first, second = (push(volume, artifact(seed), "a").record for seed in (1, 2))
    assert volume.is_live(first)
    there = Registry(volume.root)
    there.delete("default", "a", 1)
    assert (volume.is_live(first), volume.is_live(second)) == (False, True)
    there.delete("default", "a")
    assert not volume.is_live(second)
    push(there, artifact(2), "a")
    assert not volume.is_live(second)


def test_a_quarantined_version_is_still_live(registry: Registry) -> None:
    record = push(registry, artifact(1), "a").record
    registry.quarantine(record, "rotten")
    assert registry.is_live(record)


@pytest.mark.parametrize("change", [{"tenant": "theirs"}, {"name": "b"}, {"version": 7}])
def test_a_record_that_was_never_published_is_not_live(change: dict[str, object], registry: Registry) -> None:
    record = push(registry, artifact(1), "a").record
    assert not registry.is_live(replace(record, **change))  # type: ignore[arg-type]


def test_asking_if_a_record_is_live_reads_only_the_variants_state(volume: Registry) -> None:
    for seed in (1, 2, 3):
        push(volume, artifact(seed), "a")
    volume.delete("default", "a", 1)
    home = volume.root / "variants" / "default" / "a"
    to_resolve = files_opened_by(volume, "registry.resolve('default', 'a')")
    to_do_both = files_opened_by(volume, "registry.is_live(registry.resolve('default', 'a'))")
    assert to_do_both == [*to_resolve, home, home / "state-000001.json"]


def test_a_number_is_not_used_again_even_when_its_deleted_record_is_lost(volume: Registry) -> None:
    push(volume, artifact(1), "a")
    volume.delete("default", "a")
    (volume.root / "variants" / "default" / "a" / "1.json").unlink()
    assert push(volume, artifact(2), "a").record.version == 2


def test_a_tenants_own_variant_hides_a_public_one_and_others_get_the_public_one(registry: Registry) -> None:
    push(registry, artifact(1), "a", tenant="open")
    registry.set_visibility("open", "a", "public")
    push(registry, artifact(2), "a", tenant="mine")
    assert registry.resolve("mine", "a").digest == digest_of(2)
    assert registry.resolve("theirs", "a").digest == digest_of(1)
    registry.delete("mine", "a")
    assert registry.resolve("mine", "a").digest == digest_of(1)


def test_a_version_that_the_own_variant_lacks_is_not_taken_from_the_public_one(registry: Registry) -> None:
    for seed in (1, 2):
        push(registry, artifact(seed), "a", tenant="open")
    registry.set_visibility("open", "a", "public")
    push(registry, artifact(3), "a", tenant="mine")
    with pytest.raises(VariantNotFound, match="'a' has no version 2"):
        registry.resolve("mine", "a", 2)


def test_another_tenants_variant_looks_like_none(registry: Registry) -> None:
    push(registry, artifact(1), "a", tenant="theirs")
    with pytest.raises(VariantNotFound) as secret:
        registry.resolve("mine", "a")
    with pytest.raises(VariantNotFound) as missing:
        registry.resolve("mine", "b")
    assert str(secret.value) == str(missing.value).replace("'b'", "'a'")


def test_a_list_holds_all_variants_or_one_tenants(registry: Registry) -> None:
    for tenant, name in (("mine", "b"), ("mine", "a"), ("other", "a")):
        push(registry, artifact(1), name, tenant=tenant)
    assert [(v.tenant, v.name) for v in registry.variants()] == [
        ("mine", "a"),
        ("mine", "b"),
        ("other", "a"),
    ]
    assert [v.name for v in registry.variants("mine")] == ["a", "b"]
    assert registry.variants("unknown") == []


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_could_leave_its_directory_is_refused(name: str, volume: Registry) -> None:
    before = sorted(volume.root.rglob("*"))
    with pytest.raises(UsageError, match=r"variant name .* is not allowed"):
        push(volume, artifact(1), name)
    with pytest.raises(UsageError, match=r"tenant name .* is not allowed"):
        push(volume, artifact(1), "a", tenant=name)
    assert sorted(volume.root.rglob("*")) == before


@pytest.mark.parametrize("name", BAD_NAMES)
def test_nothing_is_found_under_a_bad_name(name: str, registry: Registry) -> None:
    push(registry, artifact(1), "a")
    for tenant, variant in ((name, "a"), ("default", name)):
        with pytest.raises(VariantNotFound):
            registry.resolve(tenant, variant)
        with pytest.raises(VariantNotFound):
            registry.activate(tenant, variant, 1)


@pytest.mark.parametrize("name", ["base", "other"])
def test_reserved_names_are_refused(name: str, registry: Registry) -> None:
    with pytest.raises(UsageError, match="reserved"):
        push(registry, artifact(1), name)


@pytest.mark.parametrize("digest", ["", "../objects", "A" * 64, "sha256:" + "a" * 64, "a" * 64 + "\n"])
def test_an_object_is_asked_for_by_bare_lowercase_digits_only(digest: str, volume: Registry) -> None:
    with pytest.raises(UsageError, match="is not a digest"):
        volume.object_path(replace(stored(1), digest=digest))


def nested(depth: int) -> object:
    return [nested(depth - 1)] if depth else []


@pytest.mark.parametrize(
    "fidelity",
    [{"kl": float("nan")}, {"x": nested(300)}, {"x": "\ud800"}, {"x": "a" * (1 << 20)}, {"x": object()}],
    ids=["not a number", "nested", "half a character", "large", "no JSON"],
)
def test_a_fidelity_report_that_could_not_be_read_back_is_refused_before_anything_is_stored(
    fidelity: dict[str, object], registry: Registry
) -> None:
    with registry.open_upload(None) as upload:
        upload.write(b"x")
        facts = replace(FACTS, fidelity=fidelity)
        with pytest.raises(ArtifactError, match="fidelity report of 'a'"):
            registry.publish(upload.seal(), facts, tenant="default", name="a")
    assert registry.usage().num_objects == 0
    assert registry.variants() == []


def test_a_quarantined_object_is_not_served_and_kept_as_evidence(volume: Registry) -> None:
    record = push(volume, artifact(1), "a").record
    volume.object_path(record).write_bytes(b"rotten")
    volume.quarantine(record, "chunk 0 differs")
    with pytest.raises(
        VariantQuarantined, match=r"version 1 of 'a' .*chunk 0 differs.*upload its artifact again"
    ):
        volume.resolve("default", "a")
    assert not volume.object_path(record).exists()
    assert (volume.root / "quarantine" / record.digest).read_bytes() == b"rotten"
    assert volume.usage().num_quarantined == 1
    assert volume.check().is_clean


def test_another_version_of_a_quarantined_variant_can_be_promoted_but_not_the_bad_one(
    registry: Registry,
) -> None:
    for seed in (1, 2):
        push(registry, artifact(seed), "a")
    registry.quarantine(registry.resolve("default", "a", 2), "rotten")
    registry.activate("default", "a", 1)
    assert registry.resolve("default", "a").version == 1
    with pytest.raises(VariantQuarantined):
        registry.activate("default", "a", 2)


@pytest.mark.parametrize("name", ["a", "b"])
def test_uploading_the_good_bytes_again_heals_every_variant_that_has_them(
    name: str, volume: Registry
) -> None:
    record = push(volume, artifact(1), "a").record
    volume.object_path(record).write_bytes(b"rotten")
    volume.quarantine(record, "chunk 0 differs")
    assert push(volume, artifact(1), name).created == (name == "b")
    assert volume.resolve("default", "a") == record
    assert volume.object_path(record).read_bytes() == artifact(1)
    assert volume.usage().num_quarantined == 0
    assert os.listdir(volume.root / "quarantine") == []


def test_an_upload_repairs_a_corrupt_object_that_was_not_noticed(volume: Registry) -> None:
    record = push(volume, artifact(1), "a").record
    volume.object_path(record).write_bytes(b"rotten")
    push(volume, artifact(1), "a")
    assert volume.object_path(record).read_bytes() == artifact(1)


def test_a_missing_object_can_be_quarantined_too(registry: Registry) -> None:
    record = push(registry, artifact(1), "a").record
    registry.object_path(record).unlink()
    registry.quarantine(record, "it is missing")
    with pytest.raises(VariantQuarantined, match="it is missing"):
        registry.resolve("default", "a")


def test_a_directory_that_refuses_is_an_unavailable_registry_with_its_path_for_operators_alone(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        RegistryUnavailable, match=r"file/registry/format\.json: Not a directory: nothing was acknowledged"
    ) as caught:
        Registry(tmp_path / "file" / "registry")
    assert "Not a directory: nothing was acknowledged" in caught.value.public
    assert "/" not in caught.value.public


def test_a_volume_that_vanished_does_not_look_like_a_registry_without_variants(volume: Registry) -> None:
    record = push(volume, artifact(1), "a").record
    volume.root.rename(volume.root.with_name("elsewhere"))
    volume.root.mkdir()
    for call in (
        lambda: volume.resolve("default", "a"),
        lambda: volume.variant("default", "a"),
        lambda: volume.variants(),
        lambda: volume.summaries("default", ["a"]),
        lambda: volume.stored("default"),
        lambda: volume.tenants(),
        lambda: volume.probe(),
        lambda: volume.is_live(record),
        lambda: volume.activate("default", "a", 1),
        lambda: volume.delete("default", "a"),
        lambda: volume.gc(),
    ):
        with pytest.raises(RegistryUnavailable):
            call()


def test_resolving_reads_one_variants_files_however_many_there_are(volume: Registry) -> None:
    for name in ("a", "b", "c"):
        push(volume, artifact(1), name)
    home = volume.root / "variants" / "default" / "a"
    seen = files_opened_by(volume, "registry.resolve('default', 'a')")
    assert set(seen) == {home, home / "1.json"}


def files_opened_by(registry: Registry, call: str) -> list[Path]:
    """Make a call in another process and return the files and directories that it opens, in order."""
    program = (
        "import sys; from pathlib import Path; from deltastore.registry import Registry\n"
        "seen = []; registry = Registry(Path(sys.argv[1]))\n"
        "sys.addaudithook(lambda event, args: seen.append(str(args[0])) if event in ('open', 'os.listdir', "
        "'os.scandir') else None)\n"
        f"{call}; print('\\n'.join(seen))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(registry.root)], capture_output=True, text=True, check=True
    )
    return [Path(line) for line in done.stdout.splitlines()]
