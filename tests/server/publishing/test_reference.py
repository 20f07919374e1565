"""References to a hub's files: the form that is understood, and forms that could mean something else."""

from __future__ import annotations

import pytest

from server.errors import InvalidRequest
from server.publishing.hub import HubReference


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("hf://acme/delta@main", ("acme/delta", "main", None)),
        ("hf://acme/delta@v1.0/a/b.safetensors", ("acme/delta", "v1.0", "a/b.safetensors")),
        ("hf://a/b@refs%2Fpr%2F1", ("a/b", "refs/pr/1", None)),
        (f"hf://a-1/b_2.c@{'0' * 40}/x", ("a-1/b_2.c", "0" * 40, "x")),
    ],
)
def test_a_reference_is_parsed(source: str, expected: tuple[str, str, str | None]) -> None:
    found = HubReference.parse(source)
    assert (found.repo, found.revision, found.file) == expected


@pytest.mark.parametrize(
    "source",
    [
        "hf://acme/delta", "hf://acme@main", "hf://acme/delta@", "hf://acme/delta@main/", "hf://acme/../x@main",
        "hf://../delta@main", "hf://acme/delta@..", "hf://acme/delta@main/../x", "hf://acme/delta@main/a//b",
        "hf://acme/delta@main/./x", "hf://acme/delta@%2e%2e%2fx", "hf://acme/delta@a%00b", "hf://a/b/c@main",
        "hf://acme/delta@main/x?y", "hf://acme/delta@main/x#y", "hf://acme/delta@main/x\\y", "hf://acme/delta@a b",
        "hf://acme/delta@main/x%2e", "hf://user@host/acme/delta@main", "hf://.acme/delta@main", "hf://acme/delta.@main",
    ],
)  # fmt: skip
def test_any_other_form_is_refused(source: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        HubReference.parse(source)
    assert refused.value.param == "source"
