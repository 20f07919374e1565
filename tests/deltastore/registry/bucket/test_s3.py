"""A registry on an S3 server: two machines, its commands, and a bucket that fails or is gone."""

from __future__ import annotations

import socket
from pathlib import Path

import obstore
import pytest
from typer.testing import CliRunner

from deltastore.errors import RegistryUnavailable, UsageError, VariantQuarantined
from deltastore.registry import Registry
from deltastore.registry.bucket import files as bucket_files
from deltastore.registry.cli import app
from deltastore.registry.object_cache import ObjectCache
from tests.deltastore.helpers.buckets import CACHE_BYTES
from tests.deltastore.helpers.crash_storage import artifact, push
from tests.helpers.s3_server import Bucket


@pytest.fixture(autouse=True)
def environment(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)


def machine(bucket: Bucket, directory: Path) -> Registry:
    """Open the bucket's registry as a machine with a cache of its own does."""
    return Registry.open(bucket.url, ObjectCache(directory, CACHE_BYTES))


def test_one_machine_sees_what_another_one_changes(bucket: Bucket, tmp_path: Path) -> None:
    here, there = machine(bucket, tmp_path / "here"), machine(bucket, tmp_path / "there")
    for seed in (1, 2):
        push(here, artifact(seed), "a")
    record = there.resolve("default", "a")
    assert there.object_path(record).read_bytes() == artifact(2)
    there.activate("default", "a", 1)
    assert here.resolve("default", "a").version == 1
    here.delete("default", "a")
    assert there.variants() == []
    assert not there.is_live(record)
    assert len(there.gc().objects) == 2
    assert machine(bucket, tmp_path / "new").check().is_clean
    assert here.usage().num_objects == 0


def test_an_object_of_several_parts_is_stored_and_fetched(bucket: Bucket, tmp_path: Path) -> None:
    data = artifact(1, 40 << 20)
    record = push(machine(bucket, tmp_path / "here"), data, "a").record
    there = machine(bucket, tmp_path / "there")
    assert there.object_path(record).read_bytes() == data
    assert there.check().is_clean


def test_an_object_whose_bytes_changed_in_the_store_is_quarantined_and_healed(
    bucket: Bucket, tmp_path: Path
) -> None:
    registry = machine(bucket, tmp_path / "here")
    record = push(registry, artifact(1), "a").record
    obstore.put(bucket.store("registry"), f"objects/{record.stored_as}", artifact(2))
    there = machine(bucket, tmp_path / "there")
    status = there.object_path(record).stat()
    assert len(there.check().findings) == 1
    assert there.quarantine(record, "chunk 0 differs", status)
    with pytest.raises(VariantQuarantined, match="chunk 0 differs"):
        machine(bucket, tmp_path / "new").resolve("default", "a")
    assert there.usage().num_quarantined == 1
    push(registry, artifact(1), "a")
    assert machine(bucket, tmp_path / "newer").resolve("default", "a") == record
    assert there.check().is_clean


def test_a_copy_that_this_machine_damaged_quarantines_nothing(bucket: Bucket, tmp_path: Path) -> None:
    registry = machine(bucket, tmp_path)
    record = push(registry, artifact(1), "a").record
    path = registry.object_path(record)
    path.write_bytes(artifact(2))
    assert not registry.quarantine(record, "chunk 0 differs", path.stat())
    assert registry.object_path(record).read_bytes() == artifact(1)
    assert registry.resolve("default", "a") == record


def test_an_object_that_is_missing_in_the_bucket_is_missing_here(bucket: Bucket, tmp_path: Path) -> None:
    registry = machine(bucket, tmp_path / "here")
    record = push(registry, artifact(1), "a").record
    obstore.delete(bucket.store("registry"), f"objects/{record.stored_as}")
    there = machine(bucket, tmp_path / "there")
    assert not there.object_path(record).exists()
    assert not there.recover(record)
    assert "is missing" in there.check().findings[0].problem
    assert not push(there, artifact(1), "a").created
    assert machine(bucket, tmp_path / "new").object_path(record).read_bytes() == artifact(1)


def test_the_commands_work_on_a_bucket(bucket: Bucket, tmp_path: Path) -> None:
    push(machine(bucket, tmp_path), artifact(1), "a")
    run = CliRunner().invoke
    assert '"name": "a"' in run(app, ["ls", "--registry", bucket.url, "--json"]).output
    assert "removed 0 objects" in run(app, ["gc", "--registry", bucket.url]).output
    assert "clean" in run(app, ["check", "--registry", bucket.url]).output
    wrong = run(app, ["ls", "--registry", f"{bucket.url}-mistyped"])
    assert isinstance(wrong.exception, RegistryUnavailable)


def test_a_bucket_that_is_gone_or_cannot_be_reached_is_an_error_and_not_an_empty_registry(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = machine(bucket, tmp_path)
    record = push(registry, artifact(1), "a").record
    store = bucket.store("registry")
    obstore.delete(store, [meta["path"] for meta in obstore.list(store).collect()])
    # Whatever is in memory.
    with pytest.raises(RegistryUnavailable, match="is gone"):
        registry.probe()
    monkeypatch.setattr(bucket_files, "PRESENT_FOR_S", -1.0)
    for call in (
        lambda: registry.resolve("default", "a"),
        registry.variants,
        lambda: registry.is_live(record),
    ):
        with pytest.raises(RegistryUnavailable, match="is gone"):
            call()
    # Neither is gone, since it never was there.
    cache = ObjectCache(tmp_path / "none", CACHE_BYTES)
    with pytest.raises(RegistryUnavailable, match="there is no bucket no-such-bucket: create it"):
        Registry.open("s3://no-such-bucket/registry", cache)
    with pytest.raises(RegistryUnavailable, match="-mistyped is not a registry"):
        Registry.open(f"{bucket.url}-mistyped", cache, is_made=False)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{closed.getsockname()[1]}")
        with pytest.raises(RegistryUnavailable, match="nothing was acknowledged; check the endpoint"):
            machine(bucket, tmp_path / "unreachable")


def test_an_endpoint_without_tls_must_be_allowed(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(bucket, tmp_path)
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(
        UsageError, match=f"{bucket.endpoint} of AWS_ENDPOINT_URL has no TLS: set AWS_ALLOW_HTTP"
    ):
        machine(bucket, tmp_path)


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
@pytest.mark.parametrize(
    "endpoint",
    [
        "127.0.0.1:9900", "minio.example.com", "minio.example.com:9000", "https://", "http://", "https://:9000",
        "https://minio:port", "https://minio:99999", "https://[::1", "https://256.0.0.1",
        "https://[:]", "https://min io", "https://minio/a b", " ",
    ],
)  # fmt: skip
def test_an_endpoint_that_is_no_url_is_refused(
    endpoint: str, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, endpoint)
    with pytest.raises(UsageError) as refused:
        Registry.open("s3://bucket/prefix", ObjectCache(tmp_path, CACHE_BYTES))
    wanted = f"the endpoint {endpoint!r} of {variable} is no URL: give https://HOST or https://HOST:PORT"
    assert str(refused.value) == wanted


@pytest.mark.parametrize("location", ["s3://", "s3://UPPER/x", "s3://bucket/../x?y"])
def test_a_malformed_location_is_refused(location: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="give --registry s3://BUCKET/PREFIX"):
        Registry.open(location, ObjectCache(tmp_path, CACHE_BYTES))
