"""Shards of deltas: ranks' products, put together as tensor parallelism does, equal those of the whole delta."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from deltastore.errors import ArtifactError, ArtifactTooLarge
from deltastore.format.artifact import Artifact
from deltastore.format.header import read_into
from deltastore.format.matrix import MatrixDelta, SignPlane, pack_signs, unpack_signs
from server.deltas.resident import DeltaTables, Part, ReadTensors, Rows, Slot
from server.deltas.sharding import WHOLE, Copy, Cut, RankShare, ShardTables, pack, shard_of
from server.kernels import add_planes, add_rows
from tests.server.helpers.placed import write

CPU = torch.device("cpu")
NUM_ROWS = 5
ROWS = Rows(NUM_ROWS, 1, CPU)
# The rows of the base have no slot.
OWN = np.array([0, -1, 0, 0, -1])
ROWS.set(OWN)
AXES = ("scalar", "out", "in", "both")


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def coded(out_features: int, in_features: int, axis: str, num_planes: int, rank: int) -> MatrixDelta:
    planes = []
    for number in range(num_planes):
        delta = drawn(out_features, in_features, seed=number + 1)
        scale_out = {"scalar": delta.abs().mean()[None], "in": None}.get(axis, delta.abs().mean(1))
        scale_in = delta.abs().mean(0) if axis in ("in", "both") else None
        planes.append(SignPlane.from_scales(pack_signs(delta), in_features, scale_out, scale_in))
    if not rank:
        return MatrixDelta(tuple(planes))
    left, right = drawn(out_features, rank, seed=8).half(), drawn(rank, in_features, seed=9).half()
    return MatrixDelta(tuple(planes), left, right)


class Rank:
    """One rank's slot and tables of an artifact."""

    def __init__(self, path: Path, share: RankShare, biases: Mapping[int, Tensor] | None = None) -> None:
        self.tables = DeltaTables()
        for part in share.parts:
            self.tables.add_part(part)
        for number, (name, cut) in enumerate(share.vectors):
            own = (biases or {}).get(number, torch.zeros(cut.num_rows))
            self.tables.add_vector(name, own)
        self.tables.allocate(1, CPU)
        self.slot = Slot(0, torch.full((share.slot_bytes,), 255, dtype=torch.uint8))
        with Artifact.open(path) as artifact:
            section = torch.empty(artifact.manifest.device_bytes, dtype=torch.uint8)
            read_into(artifact.fd, section.numpy().data, artifact.header.data_start, str(path))
            tables = ShardTables(self.tables, share, CPU)
            shard = tables.layout(artifact.header, artifact.manifest, "0" * 64)
        self.num_bytes = shard.num_bytes
        tables.adopt(shard, self.slot, section)

    def product(self, x: Tensor, base: Tensor) -> Tensor:
        """Return the products of a layer with one part."""
        output = x @ base.T
        add_planes(output, x, self.tables.rows, ROWS.order, ROWS.ranges, [len(base)])
        return output


def share_of(
    part: Part, cut: Cut, *vectors: tuple[str, Cut], slot_bytes: int = 1 << 16, elsewhere: str = ""
) -> RankShare:
    """Return a share of one part. `elsewhere` names a vector of another rank."""
    names = frozenset({elsewhere, *(name for name, _ in vectors)})
    return RankShare((part,), (cut,), vectors, ReadTensors((part,), names, (), 0), 0, slot_bytes)


def ends_of(size: int, num_ranks: int) -> list[int]:
    """Return where the ranks' shares of a size begin and end; they differ, and some begin within a byte of signs."""
    return [0, *(size * number // num_ranks + number % 2 for number in range(1, num_ranks)), size]


MATRICES = [
    (out_features, in_features, axis, num_planes, rank)
    for out_features, in_features in ((9, 45), (16, 92), (7, 24))
    for axis, num_planes, rank in zip(AXES, (1, 2, 4, 3), (0, 0, 1, 3), strict=True)
]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(("out_features", "in_features", "axis", "num_planes", "rank"), MATRICES)
def test_ranks_with_rows_of_a_matrix_compute_their_outputs(
    tmp_path: Path, out_features: int, in_features: int, axis: str, num_planes: int, rank: int, num_ranks: int
) -> None:
    delta, base = (
        coded(out_features, in_features, axis, num_planes, rank),
        drawn(out_features, in_features, seed=5),
    )
    write(tmp_path / "a", {"m": delta})
    x, outputs = drawn(NUM_ROWS, in_features, seed=6), []
    for begin, end in pairwise(ends_of(out_features, num_ranks)):
        share = share_of(Part("m", end - begin), Cut(((begin, end),)))
        outputs.append(Rank(tmp_path / "a", share).product(x, base[begin:end]))
    torch.testing.assert_close(torch.cat(outputs, 1), expected(x, base, delta.dense()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(("out_features", "in_features", "axis", "num_planes", "rank"), MATRICES)
def test_ranks_with_columns_of_a_matrix_sum_up_to_its_outputs(
    tmp_path: Path, out_features: int, in_features: int, axis: str, num_planes: int, rank: int, num_ranks: int
) -> None:
    delta, base = (
        coded(out_features, in_features, axis, num_planes, rank),
        drawn(out_features, in_features, seed=5),
    )
    write(tmp_path / "a", {"m": delta})
    x, total = drawn(NUM_ROWS, in_features, seed=6), torch.zeros(NUM_ROWS, out_features)
    for begin, end in pairwise(ends_of(in_features, num_ranks)):
        share = share_of(Part("m", out_features), Cut(columns=(begin, end)))
        own = x[:, begin:end].contiguous()
        total += Rank(tmp_path / "a", share).product(own, base[:, begin:end])
    torch.testing.assert_close(total, expected(x, base, delta.dense()), rtol=1e-4, atol=1e-4)


def expected(x: Tensor, base: Tensor, delta: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return each row's product with the base, or with the base and the delta."""
    own = x @ (base + delta).T + (0 if bias is None else bias)
    return torch.where(torch.from_numpy(OWN)[:, None] == 0, own, x @ base.T)


def test_whole_tensors_and_biases_are_cut_and_a_sum_has_its_bias_once(tmp_path: Path) -> None:
    base, whole, bias = drawn(6, 11, seed=1), drawn(6, 11, seed=2), drawn(6, seed=3)
    write(tmp_path / "a", {}, {"m": whole.half(), "b": bias})
    whole, x = whole.half().float(), drawn(NUM_ROWS, 11, seed=4)
    want = expected(x, base, whole - base, bias)
    by_rows = []
    for begin, end in ((0, 4), (4, 6)):
        rows = Cut(((begin, end),))
        share = share_of(Part("m", end - begin, bias=0), rows, ("b", rows))
        by_rows.append(Rank(tmp_path / "a", share).product(x, base[begin:end]))
    torch.testing.assert_close(torch.cat(by_rows, 1), want)
    total = torch.zeros(NUM_ROWS, 6)
    for begin, end in ((0, 5), (5, 11)):
        first = not begin
        part, cut = Part("m", 6, bias=0 if first else None), Cut(columns=(begin, end))
        vectors = (("b", WHOLE),) if first else ()
        share = share_of(part, cut, *vectors, elsewhere="b")
        rank = Rank(tmp_path / "a", share, {0: torch.zeros(6)})
        total += rank.product(x[:, begin:end].contiguous(), base[:, begin:end])
    torch.testing.assert_close(total, want)


def test_a_fused_tensor_gives_a_rank_rows_of_each_of_its_parts(tmp_path: Path) -> None:
    """Two ranks, four heads of queries, and one of keys and of values that both have."""
    delta, base = coded(12, 13, "both", 2, 1), drawn(12, 13, seed=5)
    write(tmp_path / "a", {"qkv": delta})
    x = drawn(NUM_ROWS, 13, seed=6)
    for ranges in (((0, 4), (8, 10), (10, 12)), ((4, 8), (8, 10), (10, 12))):
        rows = torch.cat([torch.arange(*each) for each in ranges])
        rank = Rank(tmp_path / "a", share_of(Part("qkv", len(rows)), Cut(ranges)))
        want = expected(x, base[rows], delta.dense()[rows])
        torch.testing.assert_close(rank.product(x, base[rows]), want, rtol=1e-4, atol=1e-4)


EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
# As vLLM divides 19 tokens, with room for 6 more: a rank may have tokens of both kinds, or of one alone, or none.
VOCABULARY = ((0, 10), (10, 20), (20, 25), (25, 25))


def vocabulary_of(begin: int, end: int) -> tuple[RankShare, list[int]]:
    """Return what a rank with some tokens reads, and where the base's and the others end."""
    num_base = max(0, min(end, 19) - begin)
    ends = [num_base, end - begin][: 1 + (end - begin > num_base)]
    parts = [
        Part(name, num_base, is_beyond=is_beyond, embedding=embedding)
        for name, embedding in ((EMBEDDING, None), (HEAD, EMBEDDING))
        for is_beyond in (False, True)[: len(ends)]
    ]
    read = ReadTensors(tuple(parts), frozenset(), tuple(parts), 25)
    return RankShare(tuple(parts), (Cut(((begin, end),)),) * len(parts), (), read, 19, 1 << 16), ends


@pytest.mark.parametrize("num_added", [0, 4])
@pytest.mark.parametrize("form", ["tied", "untied", "whole"])
def test_a_vocabulary_is_cut_for_the_embedding_and_the_head(
    tmp_path: Path, form: str, num_added: int
) -> None:
    base, x = drawn(19, 13, seed=5), drawn(NUM_ROWS, 13, seed=6)
    deltas = {EMBEDDING: coded(19, 13, "both", 2, 0), HEAD: coded(19, 13, "out", 1, 2)}
    added = {name: drawn(num_added, 13, seed=7) for name in deltas if num_added}
    wanted = {
        name: torch.cat([base + delta.dense(), *([added[name]] if added else [])])
        for name, delta in deltas.items()
    }
    if form == "tied":
        deltas.pop(HEAD)
        added.pop(HEAD, None)
        wanted[HEAD] = wanted[EMBEDDING]
    if form == "whole":
        write(tmp_path / "a", {}, wanted)
    else:
        write(tmp_path / "a", deltas, added=added, tied=form == "tied")
    ids = torch.tensor([3, 4, 18 + num_added, 9, 10])
    looked_up, logits = torch.zeros(NUM_ROWS, 13), torch.zeros(NUM_ROWS, 0)
    own, base_rows = torch.from_numpy(OWN) == 0, torch.cat([base, torch.zeros(6, 13)])
    for begin, end in VOCABULARY:
        share, ends = vocabulary_of(begin, end)
        rank = Rank(tmp_path / "a", share)
        assert rank.tables.num_added.tolist() == [0, num_added]
        is_here = (ids >= begin) & (ids < end)
        local, output = torch.where(is_here, ids - begin, 0), base_rows[ids].clone()
        add_rows(output, local, rank.tables.rows[: len(ends)], ROWS.order, ROWS.ranges, ends[0], 1.0)
        looked_up += torch.where(is_here[:, None], output, 0.0)
        output = x @ base_rows[begin:end].T
        add_planes(output, x, rank.tables.rows[len(ends) :], ROWS.order, ROWS.ranges, ends)
        logits = torch.cat([logits, output], 1)
    torch.testing.assert_close(looked_up[own], wanted[EMBEDDING][ids[own]])
    torch.testing.assert_close(looked_up[~own], base_rows[ids[~own]])
    num_tokens = 19 + num_added
    torch.testing.assert_close(logits[own, :num_tokens], x[own] @ wanted[HEAD].T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits[~own], x[~own] @ base_rows.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("begin", "end"), [(0, 8), (0, 5), (3, 20), (8, 20), (13, 21), (5, 6), (20, 21), (0, 21)]
)
def test_any_columns_of_signs_are_packed_as_if_coded_alone(begin: int, end: int) -> None:
    signs = pack_signs(drawn(6, 21, seed=1))
    copy = Copy(0, 2, 6, 3, begin, end)
    memory = np.full(2 + 6 * copy.width + 1, 255, dtype=np.uint8)
    pack([copy], signs.numpy().reshape(-1), memory)
    alone = pack_signs(unpack_signs(signs, 21)[:, begin:end].contiguous())
    assert memory[2:-1].tobytes() == alone.numpy().tobytes()
    assert (memory[[0, 1, -1]] == 255).all()


def test_an_artifact_that_a_rank_cannot_take_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path / "a", {"m": coded(8, 64, "both", 1, 0)}, {"n": drawn(8, seed=1)})
    part, cut = Part("m", 4), Cut(((0, 4),))
    with Artifact.open(tmp_path / "a") as artifact:
        arguments = artifact.header, artifact.manifest, "0" * 64
        with pytest.raises(ArtifactError, match="reads 'n'"):
            shard_of(*arguments, share_of(part, cut))
        with pytest.raises(
            ArtifactTooLarge, match=r"a rank's share of it needs .* slot has 100.*--slot-headroom"
        ):
            shard_of(*arguments, share_of(part, cut, ("n", WHOLE), slot_bytes=100))
        other = Part("m", 8)
        read = ReadTensors((part,), frozenset({"n"}), (part,), 7)
        share = RankShare((part, other), (cut, WHOLE), (), replace(read, num_tokens=8), 8, 1 << 16)
        with pytest.raises(ArtifactError, match="'m' is in two layers"):
            shard_of(*arguments, share)
        with pytest.raises(ArtifactError, match="'m' has rows for 8 tokens, and this vLLM for 7"):
            shard_of(*arguments, replace(share, read=read))


def test_a_rank_needs_its_share_of_the_bytes(tmp_path: Path) -> None:
    write(tmp_path / "a", {"m": coded(64, 512, "out", 1, 0)})
    rank = Rank(tmp_path / "a", share_of(Part("m", 32), Cut(((32, 64),))))
    assert rank.num_bytes == 32 * 64 + 32 * 2 + 16
