"""Public variants: every tenant may use them, one tenant owns a name, and no accident makes a variant public."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deltastore.errors import PublicNameTaken, RegistryError, VariantNotFound
from deltastore.registry import Registry
from deltastore.registry.variants import NUM_KEPT
from tests.deltastore.helpers.buckets import memory_registry
from tests.deltastore.helpers.crash_storage import artifact, digest_of, push

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(params=["directory", "bucket"])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Registry:
    """Tenant acme has the variants `open`, which is public, and `own`, in a directory and in a bucket."""
    if request.param == "directory":
        return with_variants(Registry(tmp_path / "registry"))
    return with_variants(memory_registry(tmp_path))


@pytest.fixture
def volume(tmp_path: Path) -> Registry:
    """The same in a directory, for tests of its files."""
    return with_variants(Registry(tmp_path / "registry"))


def with_variants(registry: Registry) -> Registry:
    push(registry, artifact(1), "open", tenant="acme")
    push(registry, artifact(2), "own", tenant="acme")
    registry.set_visibility("acme", "open", "public")
    return registry


def seen_by(registry: Registry, tenant: str) -> dict[str, str]:
    """Return the owner of each name that a tenant's requests may use."""
    names = sorted({*registry.names(tenant), *registry.public_names()})
    return {record.name: record.tenant for record in registry.active_records(tenant, names)}


def not_found(registry: Registry, tenant: str, name: str) -> str:
    with pytest.raises(VariantNotFound) as caught:
        registry.resolve(tenant, name)
    return str(caught.value)


def test_a_variant_is_private_until_its_owner_says_otherwise(registry: Registry) -> None:
    assert registry.variant("acme", "own").visibility == "private"
    assert registry.variant("acme", "open").visibility == "public"
    registry.set_visibility("acme", "open", "private")
    assert registry.variant("acme", "open").visibility == "private"
    not_found(registry, "globex", "open")


def test_every_tenant_uses_a_public_variant_and_only_its_owner_a_private_one(registry: Registry) -> None:
    assert (
        registry.resolve("globex", "open").digest == registry.resolve("acme", "open").digest == digest_of(1)
    )
    assert not_found(registry, "globex", "own") == not_found(registry, "globex", "absent").replace(
        "absent", "own"
    )
    assert seen_by(registry, "globex") == {"open": "acme"}
    assert seen_by(registry, "acme") == {"open": "acme", "own": "acme"}


@pytest.mark.parametrize("owned", [True, False])
def test_the_error_of_an_absent_variant_names_the_callers_tenant_whatever_others_have(
    registry: Registry, owned: bool
) -> None:
    def message(name: str) -> str:
        with pytest.raises(VariantNotFound) as caught:
            registry.resolve("globex", name, owned=owned)
        return str(caught.value)

    absent = message("a")
    assert absent.startswith("there is no variant 'a' of tenant 'globex'")
    push(registry, artifact(1), "a", tenant="acme")
    assert message("a") == absent


def test_a_public_variant_is_not_among_what_another_tenant_owns(registry: Registry) -> None:
    assert registry.variants("globex") == []
    with pytest.raises(VariantNotFound):
        registry.resolve("globex", "open", owned=True)
    assert registry.resolve("acme", "open", owned=True).digest == digest_of(1)


@pytest.mark.parametrize("change", ["activate", "delete", "set_visibility", "variant"])
def test_another_tenant_changes_a_public_variant_no_more_than_an_absent_one(
    registry: Registry, change: str
) -> None:
    arguments = {"activate": (1,), "set_visibility": ("private",)}.get(change, ())
    messages = set()
    for name in ("open", "own", "absent"):
        with pytest.raises(VariantNotFound) as caught:
            getattr(registry, change)("globex", name, *arguments)
        messages.add(str(caught.value).replace(name, "absent"))
    assert len(messages) == 1
    assert registry.variant("acme", "open").visibility == "public"


def test_a_tenants_own_variant_hides_a_public_one_while_it_lives(registry: Registry) -> None:
    push(registry, artifact(3), "open", tenant="globex")
    assert registry.resolve("globex", "open").digest == digest_of(3)
    assert seen_by(registry, "globex") == {"open": "globex"}
    assert registry.resolve("initech", "open").digest == digest_of(1)
    registry.delete("globex", "open")
    assert registry.resolve("globex", "open").digest == digest_of(1)


def test_new_versions_of_a_public_variant_are_public(registry: Registry) -> None:
    push(registry, artifact(3), "open", tenant="acme")
    assert registry.resolve("globex", "open").version == 2
    assert registry.resolve("globex", "open", 1).digest == digest_of(1)


def test_a_public_name_has_one_owner(registry: Registry) -> None:
    push(registry, artifact(3), "open", tenant="globex")
    with pytest.raises(PublicNameTaken, match="take another name, or leave the variant private"):
        registry.set_visibility("globex", "open", "public")
    with pytest.raises(PublicNameTaken):
        registry.check_name_free("globex", "open")
    registry.check_name_free("acme", "open")
    registry.set_visibility("acme", "open", "private")
    registry.set_visibility("globex", "open", "public")
    assert registry.resolve("initech", "open").tenant == "globex"


def test_making_a_variant_private_leaves_the_public_one_of_another_tenant(registry: Registry) -> None:
    push(registry, artifact(3), "open", tenant="globex")
    registry.set_visibility("globex", "open", "private")
    assert registry.resolve("initech", "open").tenant == "acme"


@pytest.mark.parametrize("number", [None, 1])
def test_after_its_deletion_a_variant_of_the_same_name_is_private(tmp_path: Path, number: int | None) -> None:
    registry = Registry(tmp_path / "registry")
    push(registry, artifact(1), "open", tenant="acme", activate=False)
    registry.set_visibility("acme", "open", "public")
    registry.delete("acme", "open", number)
    for _ in range(2):
        push(registry, artifact(1), "open", tenant="acme")
        assert registry.variant("acme", "open").visibility == "private"
        not_found(registry, "globex", "open")
        registry.delete("acme", "open")


def test_the_name_of_a_deleted_public_variant_is_free(registry: Registry) -> None:
    registry.delete("acme", "open")
    push(registry, artifact(3), "open", tenant="globex")
    registry.set_visibility("globex", "open", "public")
    assert registry.resolve("acme", "open").tenant == "globex"
    registry.gc()
    assert registry.check().notes == ()


def test_only_a_variant_that_exists_becomes_public(registry: Registry) -> None:
    registry.delete("acme", "own")
    for name in ("own", "absent", "../acme/own"):
        with pytest.raises(VariantNotFound):
            registry.set_visibility("acme", name, "public")


def test_of_two_processes_that_claim_names_at_once_each_name_goes_to_one(tmp_path: Path) -> None:
    registry, names = Registry(tmp_path / "registry"), [f"n{number}" for number in range(30)]
    for tenant in ("acme", "globex"):
        for name in names:
            push(registry, artifact(1), name, tenant=tenant)
    program = (
        "import json, sys; from pathlib import Path; from deltastore.errors import PublicNameTaken\n"
        "from deltastore.registry import Registry\n"
        "registry, won = Registry(Path(sys.argv[1])), []\n"
        "for name in sys.argv[3:]:\n"
        "    try: registry.set_visibility(sys.argv[2], name, 'public'); won.append(name)\n"
        "    except PublicNameTaken: pass\n"
        "print(json.dumps(won))"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(registry.root), tenant, *order],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
        )
        for tenant, order in (("acme", names), ("globex", names[::-1]))
    ]
    one, other = (set(json.loads(process.communicate()[0])) for process in processes)
    assert one | other == set(names)
    assert not one & other
    assert {name for name, owner in seen_by(registry, "initech").items() if owner == "acme"} == one


@pytest.mark.parametrize(
    "raw", [b"", b"{", b'{"tenant": "../x", "deleted_through": 0}', b'{"tenant": "acme"}']
)
def test_a_damaged_claim_makes_nothing_public_and_is_found(volume: Registry, raw: bytes) -> None:
    (volume.root / "claims" / "open" / "000001.json").write_bytes(raw)
    assert volume.variant("acme", "open").visibility == "private"
    assert volume.resolve("acme", "open").digest == digest_of(1)
    assert seen_by(volume, "globex") == {}
    with pytest.raises(
        RegistryError, match="restore the file, or remove it and older ones to make the variant private"
    ):
        volume.resolve("globex", "open")
    (finding,) = volume.check().findings
    assert finding.path == volume.root / "claims" / "open" / "000001.json"


def test_old_claims_are_collected_and_the_newest_stays(volume: Registry) -> None:
    for _ in range(NUM_KEPT):
        volume.set_visibility("acme", "open", "private")
        volume.set_visibility("acme", "open", "public")
    volume.gc()
    assert len(os.listdir(volume.root / "claims" / "open")) == NUM_KEPT
    assert seen_by(volume, "globex") == {"open": "acme"}
    with pytest.raises(PublicNameTaken):
        volume.check_name_free("globex", "open")
