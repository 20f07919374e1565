"""Reads a variant's files (tokenizer, chat template, generation config) out of its stored object, verified.

Imports no torch, so processes that only handle text may use it. Parses no file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from deltastore.format.header import parse_verified_header
from deltastore.format.manifest import Manifest
from deltastore.format.parts import file_tensor
from deltastore.registry import Registry
from deltastore.registry.records import VersionRecord
from deltastore.registry.uploads import CHUNK_BYTES
from deltastore.verified_object import VerifiedObject


@dataclass(frozen=True, slots=True)
class VariantFiles:
    """A version's files and the facts of its manifest that handling its text needs."""

    files: Mapping[str, bytes]  # by filename; a file that equals the base's is not there
    shapes: Mapping[
        str, tuple[int, ...]
    ]  # of the fine-tune's tensors, by name; one that equals the base's is not there


class Sink(Protocol):
    """Takes a file in pieces."""

    def write(self, piece: bytes, /) -> object:
        """Take the next piece."""


# Given the name and the size of a file, returns a context that takes it; None keeps it in memory.
TakeFile = Callable[[str, int], AbstractContextManager[Sink] | None]


def read_files(
    registry: Registry, record: VersionRecord, take: TakeFile = lambda name, num_bytes: None
) -> VariantFiles:
    """Read a version's files from chunks that match the digests of its record; every needed chunk is read once.

    Takes as much memory as the files that `take` leaves and two chunks. The rows of the variant's embedding, below
    which its token ids lie, are ``shapes[base.embedding][0]``, or the base's own rows if `shapes` lacks that name.

    Raises:
        VariantQuarantined: The object is quarantined, or was found corrupt or truncated and is quarantined now.
        VariantNotFound: The object is no longer in the registry.
        ArtifactError: Another version of Peraxis wrote the manifest.
        RegistryError: The disk failed, or the version record contradicts itself.
    """
    with VerifiedObject(registry, record) as stored:
        header = parse_verified_header(stored.read(0, record.data_start))
        manifest = Manifest.from_verified_metadata(header.metadata, record.label)
        entries = {name: header.tensors[file_tensor(name)] for name in manifest.files}
        files = {}
        # In the order of the file, so that no chunk is read twice.
        for name, entry in sorted(entries.items(), key=lambda item: item[1].start):
            start, end = header.data_start + entry.start, header.data_start + entry.end
            taking = take(name, end - start)
            if taking is None:
                files[name] = stored.read(start, end)
                continue
            with taking as sink:
                for offset in range(start, end, CHUNK_BYTES):
                    sink.write(stored.read(offset, min(offset + CHUNK_BYTES, end)))
    return VariantFiles(files, {name: tuple(spec.shape) for name, spec in manifest.tensors.items()})
