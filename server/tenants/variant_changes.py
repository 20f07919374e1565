"""Changes of a tenant's variants by one caller, each with its audit line. Must not know HTTP and engines.

Every method reads and writes files: call it on a thread. A change and its line are one call, so that a client that
leaves cannot come between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deltastore.errors import PublicNameTaken
from deltastore.registry import Deleted, Publication, Registry
from deltastore.registry.records import ArtifactFacts, VersionRecord, Visibility
from deltastore.registry.uploads import SealedUpload
from server.errors import Forbidden
from server.tenants.audit import Auditor, Change
from server.tenants.tenant import Tenant


@dataclass(frozen=True, slots=True)
class VariantChanges:
    """Changes in a registry. Methods raise what the registry's do."""

    registry: Registry
    tenant: Tenant
    auditor: Auditor
    # The caller may make variants public; with `--public-names admin`, only administrators may.
    may_make_public: bool

    def check_visibility(self, name: str, visibility: Visibility | None) -> None:
        """Check that the caller may give a variant a visibility; None leaves it as it is.

        Raises:
            Forbidden: Public names are for administrators.
            PublicNameTaken: Another tenant's variant of this name is public.
        """
        if visibility != "public":
            return
        if not self.may_make_public:
            raise Forbidden(
                f"only an administrator makes variants public on this server: publish {name!r} as private, "
                "and ask the operator to share it"
            )
        self.registry.check_name_free(self.tenant.name, name)

    def publish(
        self,
        sealed: SealedUpload,
        facts: ArtifactFacts,
        name: str,
        *,
        activate: bool,
        visibility: Visibility | None,
    ) -> Publication:
        """Publish a sealed upload as a variant's next version, then set the variant's visibility if one is given."""
        self.check_visibility(name, visibility)
        publication = self.registry.publish(
            sealed, facts, tenant=self.tenant.name, name=name, activate=activate
        )
        if publication.created:
            self.note("publish", publication.record)
        if visibility is not None:
            try:
                self.set_visibility(name, visibility)
            except PublicNameTaken as error:
                # Another tenant was first, after the check.
                version = publication.record.version
                is_active = "active" if publication.active_version == version else "not active"
                raise PublicNameTaken(
                    f"version {version} is published, private and {is_active}; {error}"
                ) from error
        return publication

    def promote(self, name: str, version: int) -> None:
        """Make a version the active one."""
        self.note("promote", self.registry.activate(self.tenant.name, name, version))

    def set_visibility(self, name: str, visibility: Visibility) -> None:
        """Make a variant public or private; raises as `check_visibility` does, too."""
        self.check_visibility(name, visibility)
        self.registry.set_visibility(self.tenant.name, name, visibility)
        self.auditor.write(Change("visibility", self.tenant.name, variant=name, visibility=visibility))

    def delete(self, name: str, version: int | None) -> Deleted:
        """Delete a variant or one version."""
        deleted = self.registry.delete(self.tenant.name, name, version)
        digests = {record.version: record.digest for record in deleted.records}
        self.auditor.write(
            *(
                Change("delete", self.tenant.name, variant=name, version=number, digest=digests.get(number))
                for number in deleted.versions
            )
        )
        return deleted

    def note(self, action: Literal["publish", "promote", "pin", "unpin"], record: VersionRecord) -> None:
        """Write the audit line of a version that was changed."""
        self.auditor.write(
            Change(action, record.tenant, variant=record.name, version=record.version, digest=record.digest)
        )
