"""Checkpoints on disk: equal tensors and fingerprints for every sharding, and an error for incomplete files."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from deltastore.architecture import architecture, different_facts
from deltastore.base import Base
from deltastore.checkpoint import BLOCK_BYTES, DTYPE_NAME, INDEX_FILE, SINGLE_FILE, Checkpoint
from deltastore.errors import CheckpointError, UsageError, failures_as
from deltastore.fingerprint import MAX_CACHED_FINGERPRINTS, Fingerprints, default_cache, fingerprints

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
CONFIG = {
    "model_type": "llama",
    "tie_word_embeddings": True,
    "hidden_size": 12,
    "num_attention_heads": 4,
    "rope_theta": 1e4,
}


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        EMBEDDING: torch.randn(7, 12, generator=generator).bfloat16(),
        "model.layers.0.mlp.up_proj.weight": torch.randn(5, 12, generator=generator).half(),
        NORM: torch.randn(12, generator=generator),
        "model.scale": torch.tensor(3.0),
        "model.empty": torch.empty(0, 4),
        "model.steps": torch.arange(3),
    }


def save(directory: Path, tensors: dict[str, Tensor], num_shards: int = 1) -> Path:
    """Write a checkpoint directory as `save_pretrained` does."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    if num_shards == 1:
        save_file(tensors, directory / SINGLE_FILE)
        return directory
    files = [f"model-{index + 1:05}-of-{num_shards:05}.safetensors" for index in range(num_shards)]
    weight_map = {name: files[index % num_shards] for index, name in enumerate(tensors)}
    for file in files:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, directory / file)
    (directory / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def print_of(directory: Path) -> str:
    """Fingerprint a directory, with a cache file of its own."""
    return fingerprints(Checkpoint.open(directory), directory.parent / f"{directory.name}.cache").own


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return save(tmp_path / "whole", weights())


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return save(tmp_path / "sharded", weights(), 3)


def test_shards_hold_the_same_tensors_as_one_file(whole: Path, sharded: Path) -> None:
    one, many = Checkpoint.open(whole), Checkpoint.open(sharded)
    assert one.tensors.keys() == many.tensors.keys()
    for name, tensor in weights().items():
        assert torch.equal(one.read(name), tensor)
        assert torch.equal(many.read(name), tensor)
        assert one.read(name).dtype == tensor.dtype


@pytest.mark.parametrize(
    "rows", [slice(2, 5), slice(0, 1), slice(5, 99), slice(-2, None), slice(3, 3), slice(6, 2)], ids=str
)
def test_a_run_of_rows_is_that_part_of_the_tensor(whole: Path, rows: slice) -> None:
    assert torch.equal(Checkpoint.open(whole).read(EMBEDDING, rows), weights()[EMBEDDING][rows])


def test_rows_of_an_empty_tensor_are_empty(whole: Path) -> None:
    assert Checkpoint.open(whole).read("model.empty", slice(0, 2)).shape == (0, 4)


def test_what_was_read_can_be_written_to(whole: Path) -> None:
    checkpoint = Checkpoint.open(whole)
    checkpoint.read(NORM).zero_()
    assert torch.equal(checkpoint.read(NORM), weights()[NORM])


def test_embedding_and_head_are_found_by_name(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(save(tmp_path / "a", weights() | {HEAD: torch.ones(7, 12)}))
    assert (checkpoint.embedding_name, checkpoint.head_name) == (EMBEDDING, HEAD)
    assert not checkpoint.tied


def test_one_file_is_taken_before_an_index_as_the_library_does(sharded: Path) -> None:
    save_file({"only": torch.ones(1)}, sharded / SINGLE_FILE)
    assert list(Checkpoint.open(sharded).tensors) == ["only"]


def point_elsewhere(directory: Path, shard: str) -> None:
    index = json.loads((directory / INDEX_FILE).read_text())
    index["weight_map"][NORM] = shard
    (directory / INDEX_FILE).write_text(json.dumps(index))


def leave_out(directory: Path, name: str) -> None:
    index = json.loads((directory / INDEX_FILE).read_text())
    del index["weight_map"][name]
    (directory / INDEX_FILE).write_text(json.dumps(index))


def list_twice(directory: Path, name: str) -> None:
    """Python's JSON parser keeps the last of two equal keys, which would hide the first."""
    index = directory / INDEX_FILE
    entry = f'"{name}": "{shard_of(directory, 3).name}"'
    index.write_text(index.read_text().replace(entry, f"{entry}, {entry}"))


def shard_of(directory: Path, number: int) -> Path:
    return directory / f"model-{number:05}-of-00003.safetensors"


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda d: shutil.rmtree(d), "no such directory"),
        (
            lambda d: (d / "config.json").unlink(),
            r"config\.json does not exist, so .* is not the directory of",
        ),
        (lambda d: (d / "config.json").write_text("[]"), "it is not a JSON object"),
        (lambda d: (d / "config.json").write_text("{"), "its JSON cannot be read"),
        (lambda d: (d / "config.json").write_bytes(b"\xff\xfe"), "its JSON cannot be read"),
        (lambda d: (d / INDEX_FILE).unlink(), f"shards without their index .*: fetch {INDEX_FILE}"),
        (lambda d: (d / INDEX_FILE).write_text("{}"), "it has no weight_map"),
        (lambda d: (d / INDEX_FILE).write_text('{"weight_map": {"a": 1}}'), "it has no weight_map"),
        (lambda d: (d / INDEX_FILE).write_text('{"weight_map": {}}'), "hold no tensors"),
        (lambda d: shard_of(d, 2).unlink(), "model-00002-of-00003.safetensors: No such file"),
        (lambda d: os.truncate(shard_of(d, 2), 100), "truncated: its header needs"),
        (
            lambda d: os.truncate(shard_of(d, 2), shard_of(d, 2).stat().st_size - 1),
            "truncated: its tensors need",
        ),
        (lambda d: shutil.copy(shard_of(d, 1), shard_of(d, 2)), "is in another shard too"),
        (lambda d: leave_out(d, NORM), f"leaves out tensor '{NORM}' of model-00003-of-00003.safetensors"),
        (lambda d: list_twice(d, NORM), f"json: its JSON cannot be read: key '{NORM}' stands twice"),
        (lambda d: save_file({"a": torch.ones(1)}, shard_of(d, 2)), "is in none of its shards"),
        (lambda d: save_file({"a": torch.ones(1).to(torch.float8_e5m2)}, shard_of(d, 2)), "'a' is F8_E5M2"),
        (
            lambda d: point_elsewhere(d, "../whole/model.safetensors"),
            "is not a safetensors file of this directory",
        ),
        (
            lambda d: point_elsewhere(d, "/etc/passwd"),
            "'/etc/passwd' is not a safetensors file of this directory",
        ),
        (lambda d: point_elsewhere(d, ".."), "'..' is not a safetensors file of this directory"),
        (lambda d: point_elsewhere(d, "a\0.safetensors"), "null byte"),
        (lambda d: point_elsewhere(d, "x" * 5000 + ".safetensors"), "File name too long"),
    ],
)
def test_a_checkpoint_that_is_not_complete_is_refused(
    spoil: Callable[[Path], object], says: str, sharded: Path
) -> None:
    spoil(sharded)
    with pytest.raises(CheckpointError, match=says):
        Checkpoint.open(sharded)


def test_a_shard_that_shrinks_or_goes_later_is_an_error(whole: Path) -> None:
    checkpoint = Checkpoint.open(whole)
    stored = max(checkpoint.tensors.values(), key=lambda tensor: tensor.offset)
    os.truncate(whole / SINGLE_FILE, stored.offset)
    with pytest.raises(CheckpointError, match=r"truncated: it ends .* fetch the shard again"):
        checkpoint.read(stored.name)
    with pytest.raises(CheckpointError, match="truncated"):
        fingerprints(checkpoint, whole / "cache")
    (whole / SINGLE_FILE).unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        checkpoint.read(stored.name)
    with pytest.raises(CheckpointError, match="No such file"):
        fingerprints(checkpoint, whole / "cache")


def test_the_fingerprint_of_fixed_tensors_is_known(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(4, dtype=torch.float16).view(2, 2), "a": torch.ones(3, dtype=torch.bfloat16)}
    known = "5417ac46e48df98f42237bd4cab51537b6cb2dd05d908bc9276caaef3c46c7cc"
    assert print_of(save(tmp_path / "a", tensors)) == known


def test_the_fingerprint_does_not_depend_on_shards(whole: Path, sharded: Path) -> None:
    assert print_of(whole) == print_of(sharded)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t[NORM].view(torch.uint8).__setitem__(17, t[NORM].view(torch.uint8)[17] ^ 1),
        lambda t: t.update({"model.norm2.weight": t.pop(NORM)}),
        lambda t: t.update({NORM: t[NORM].view(torch.int32)}),
        lambda t: t.update({NORM: t[NORM].view(3, 4)}),
        lambda t: t.pop("model.empty"),
        lambda t: t.update({HEAD: t[EMBEDDING] + 1}),
        lambda t: t.update({HEAD: t[EMBEDDING].clone().view(torch.float16)}),
    ],
    ids=[
        "byte",
        "name",
        "dtype",
        "shape",
        "tensor",
        "head",
        "head with the embedding's bytes in another dtype",
    ],
)
def test_the_fingerprint_changes_with_any(
    change: Callable[[dict[str, Tensor]], object], whole: Path, tmp_path: Path
) -> None:
    tensors = weights()
    change(tensors)
    assert print_of(save(tmp_path / "changed", tensors)) != print_of(whole)


def test_a_head_that_repeats_the_embedding_is_left_out(whole: Path, tmp_path: Path) -> None:
    tensors = weights()
    tensors[EMBEDDING][0, 0] = torch.nan  # equal as bytes, though not as numbers
    once = save(tmp_path / "once", tensors)
    twice = save(tmp_path / "twice", tensors | {HEAD: tensors[EMBEDDING].clone()})
    assert Checkpoint.open(twice).tied
    one, other = (Base.of(Checkpoint.open(d), tmp_path / "cache") for d in (once, twice))
    assert one.fingerprint == other.fingerprint
    assert one.shapes == other.shapes
    assert (other.embedding, other.head) == (EMBEDDING, None)


def test_heads_are_compared_to_their_last_row(tmp_path: Path) -> None:
    embedding = torch.zeros(BLOCK_BYTES // 1024 + 3, 512, dtype=torch.float16)
    head = embedding.clone()
    head[-1, -1] = 1
    assert not Checkpoint.open(save(tmp_path / "a", {EMBEDDING: embedding, HEAD: head})).tied
    assert Checkpoint.open(save(tmp_path / "b", {EMBEDDING: embedding, HEAD: embedding.clone()})).tied


def rewrite(file: Path) -> None:
    """Change the last byte of a file and restore its mtime, as `rsync --times` does."""
    before = file.stat()
    # The kernel's clock of files is coarse: a change within one tick leaves the status as it was.
    while file.stat().st_ctime_ns == before.st_ctime_ns:
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with file.open("r+b") as out:
        out.seek(-1, os.SEEK_END)
        last = out.read(1)[0]
        out.seek(-1, os.SEEK_END)
        out.write(bytes([last ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def num_hashed(directory: Path) -> int:
    """Count the bytes that are hashed for a directory's fingerprint, with the cache of `print_of`."""
    hashed: list[int] = []
    cache = directory.parent / f"{directory.name}.cache"
    fingerprints(Checkpoint.open(directory), cache, hashed.append)
    return sum(hashed)


def test_a_fingerprint_is_computed_once_and_says_how_far_it_is(sharded: Path) -> None:
    total = sum(tensor.nbytes for tensor in weights().values())
    assert [num_hashed(sharded), num_hashed(sharded)] == [total, 0]


def test_a_file_rewritten_with_its_old_time_is_hashed_again(whole: Path) -> None:
    first = print_of(whole)
    rewrite(whole / SINGLE_FILE)
    assert print_of(whole) != first


def test_another_file_under_the_same_name_size_and_time_is_hashed_again(whole: Path) -> None:
    first, file = print_of(whole), whole / SINGLE_FILE
    other = Path(shutil.copy2(file, whole / "other"))
    rewrite(other)
    assert (other.stat().st_size, other.stat().st_mtime_ns) == (file.stat().st_size, file.stat().st_mtime_ns)
    other.replace(file)
    assert print_of(whole) != first


def test_a_cache_keeps_the_newest_fingerprints_alone(whole: Path, tmp_path: Path) -> None:
    cache = tmp_path / "whole.cache"
    others = {f"{number:064x}": ["0" * 64] for number in range(MAX_CACHED_FINGERPRINTS)}
    cache.write_text(json.dumps(others))
    value = print_of(whole)
    known = json.loads(cache.read_text())
    assert list(known)[:-1] == list(others)[1:]
    assert list(known.values())[-1][0] == value


def test_programs_that_end_together_all_remember_their_fingerprints(tmp_path: Path) -> None:
    bases = [save(tmp_path / f"base{number}", {"a": torch.full((1,), number)}) for number in range(16)]
    with ThreadPoolExecutor(16) as pool:
        values = set(
            pool.map(lambda base: fingerprints(Checkpoint.open(base), tmp_path / "cache").own, bases)
        )
    assert {own for own, *_ in json.loads((tmp_path / "cache").read_text()).values()} == values
    assert len(values) == 16


def test_a_base_takes_a_fingerprint_that_is_known_already_and_reads_nothing(whole: Path) -> None:
    checkpoint = Checkpoint.open(whole)
    os.truncate(whole / SINGLE_FILE, 0)
    base = Base.of(checkpoint, fingerprints=Fingerprints("5f" * 32))
    assert base.fingerprint == "5f" * 32
    assert base.shapes[EMBEDDING] == (7, 12)


@pytest.mark.parametrize("garbage", ["", "[]", "{", '{"a": 1}'])
def test_a_damaged_cache_costs_nothing_but_time(garbage: str, whole: Path, tmp_path: Path) -> None:
    first = print_of(whole)
    cache = tmp_path / "whole.cache"
    known = json.loads(cache.read_text())
    cache.write_text(garbage if garbage != '{"a": 1}' else json.dumps(dict.fromkeys(known, 1)))
    assert print_of(whole) == first
    assert json.loads(cache.read_text()) == known


def test_a_user_without_a_home_has_no_cache(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert not default_cache().exists()
    assert fingerprints(Checkpoint.open(whole)).own == print_of(whole)


def test_old_and_new_keys_of_one_configuration_are_the_same_facts() -> None:
    old = {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
        "attention_bias": False,
        "vocab_size": 7,
    }
    assert architecture(old) == architecture(new)
    assert different_facts(architecture(old), architecture({**new, "rms_norm_eps": 1.0})) == ["rms_norm_eps"]


def test_a_configuration_of_an_unknown_model_is_taken_as_it_is() -> None:
    assert architecture({"model_type": "own", "depth": 3, "vocab_size": 5}) == {
        "model_type": "own",
        "depth": 3,
    }


def test_a_configuration_that_the_library_refuses_is_an_error() -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: transformers refuses it: .*hidden_size"):
        architecture({"model_type": "llama", "hidden_size": "wide"})


def frequencies(dtype: torch.dtype, features: int = 3, theta: float = 1e4) -> Tensor:
    """Return the table that transformers computed and saved up to 4.31, for CONFIG's heads."""
    return (1.0 / theta ** (torch.arange(0, features, 2).float() / features)).to(dtype)


def identified(directory: Path) -> Base:
    return Base.of(Checkpoint.open(directory), directory.parent / f"{directory.name}.cache")


def old_fingerprint(tensors: dict[str, Tensor]) -> str:
    """Compute the fingerprint as it was at first: of every tensor."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        stored = tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        digest = hashlib.sha256(stored).hexdigest()
        total.update(
            json.dumps([name, DTYPE_NAME[tensors[name].dtype], list(tensors[name].shape), digest]).encode()
        )
        total.update(b"\n")
    return total.hexdigest()


ROTARY = "model.layers.0.self_attn.rotary_emb.inv_freq"
QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_base_saved_again_without_computed_tables_is_the_same(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = weights() | {QUERY: torch.ones(2, 2)}
    old = tensors | {ROTARY: frequencies(dtype)}
    with_tables, without = (
        identified(save(tmp_path / "old", old)),
        identified(save(tmp_path / "new", tensors)),
    )
    assert with_tables.fingerprint == without.fingerprint == old_fingerprint(tensors)
    # Old artifacts, which were made from either.
    for former in (old_fingerprint(old), old_fingerprint(tensors)):
        assert with_tables.is_named(former)
        assert without.is_named(former)


def test_a_table_that_no_configuration_gives_is_named_by_the_base_that_stores_it_alone(
    tmp_path: Path,
) -> None:
    tensors = weights() | {QUERY: torch.ones(2, 2)}
    old = tensors | {ROTARY: 2 * frequencies(torch.float32)}
    with_tables, without = (
        identified(save(tmp_path / "old", old)),
        identified(save(tmp_path / "new", tensors)),
    )
    assert with_tables.is_named(old_fingerprint(old))
    assert not without.is_named(old_fingerprint(old))


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.uint8], ids=str)
@pytest.mark.parametrize("has_rotary", [True, False])
def test_masks_of_old_checkpoints_are_made_too(
    mask_dtype: torch.dtype, has_rotary: bool, tmp_path: Path
) -> None:
    attention = "gpt_neox.layers.0.attention"
    tensors = {"gpt_neox.embed_in.weight": torch.ones(7, 12), f"{attention}.dense.weight": torch.ones(2, 2)}
    tables = {
        f"{attention}.bias": torch.ones(5, 5).tril()[None, None].to(mask_dtype),
        f"{attention}.masked_bias": torch.tensor(-1e9).half(),
    }
    if has_rotary:
        tables[f"{attention}.rotary_emb.inv_freq"] = frequencies(torch.float16, 2)
    config = {
        "model_type": "gpt_neox",
        "tie_word_embeddings": True,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "rotary_pct": 0.25,
    }
    for name, stored in (("new", tensors), ("old", tensors | tables)):
        save(tmp_path / name, stored)
        (tmp_path / name / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 5}))
    assert identified(tmp_path / "new").fingerprint == identified(tmp_path / "old").fingerprint
    assert identified(tmp_path / "new").is_named(old_fingerprint(tensors | tables))


@pytest.mark.parametrize(
    "lies",
    [
        {"rope_theta": "wide"},
        {"hidden_size": 1 << 40},
        {"rope_parameters": {"full": {"rope_theta": 1.0}}},
        {"model_type": "gpt2", "n_positions": 1 << 40},
        {"rope_theta": -1},
    ],
    ids=str,
)
def test_a_configuration_that_gives_no_tables_costs_no_fingerprint(
    lies: dict[str, object], tmp_path: Path
) -> None:
    directory = save(tmp_path / "base", weights() | {QUERY: torch.ones(2, 2)})
    value = print_of(directory)
    (directory / "config.json").write_text(json.dumps(CONFIG | lies))
    assert print_of(directory) == value


def test_a_configuration_that_names_its_sizes_otherwise_costs_no_fingerprint(tmp_path: Path) -> None:
    directory = save(tmp_path / "base", weights() | {QUERY: torch.ones(2, 2)})
    value = print_of(directory)
    for sizes in ({"d_model": 12, "n_heads": 4}, {"hidden_size": 12}, {"num_attention_heads": 4}):
        config = {"model_type": "own", "tie_word_embeddings": True, "rope_theta": 1e4, **sizes}
        (directory / "config.json").write_text(json.dumps(config))
        assert print_of(directory) == value


@pytest.mark.parametrize(
    "lies", [{"num_attention_heads": 0}, {"head_dim": [1]}, {"rope_parameters": "x"}], ids=str
)
def test_a_configuration_that_transformers_refuses_is_refused_when_it_is_opened(
    lies: dict[str, object], tmp_path: Path
) -> None:
    directory = save(tmp_path / "base", weights())
    (directory / "config.json").write_text(json.dumps(CONFIG | lies))
    with pytest.raises(CheckpointError, match=r"config\.json: transformers refuses it"):
        Checkpoint.open(directory)


def test_a_changed_weight_has_no_former_fingerprint_in_common(tmp_path: Path) -> None:
    one, other = (
        identified(
            save(
                tmp_path / name,
                weights() | {QUERY: torch.full((2, 2), value), ROTARY: frequencies(torch.half)},
            )
        )
        for name, value in (("one", 1.0), ("other", 2.0))
    )
    assert not {one.fingerprint, *one.former} & {other.fingerprint, *other.former}


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ([], "it is empty"),
        (
            ["adapter_config.json", "adapter_model.safetensors"],
            "an adapter of peft ('adapter_config.json'): it is a fine",
        ),
        (
            ["pytorch_model.bin"],
            "weights as a pickle, which could run code and is not loaded ('pytorch_model.bin')",
        ),
        (["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"], "weights as a pickle"),
        (["model.Q4_K_M.gguf"], "weights in llama.cpp's form (GGUF) ('model.Q4_K_M.gguf')"),
        (
            ["consolidated.safetensors", "params.json"],
            "weights in the form of the model's authors (consolidated)",
        ),
        (["consolidated.00.pth", "params.json"], "weights in the form of the model's authors (consolidated)"),
        (
            ["global_step500", "zero_to_fp32.py", "latest"],
            "shards of DeepSpeed ('global_step500'): run its zero_to",
        ),
        ([".metadata", "__0_0.distcp"], "a distributed checkpoint of torch (FSDP)"),
        (["pytorch_model_fsdp_0"], "a distributed checkpoint of torch (FSDP)"),
        (["tf_model.h5"], "weights of another framework"),
        (["model-00001-of-00002.safetensors"], f"shards without their index .*: fetch {INDEX_FILE}"),
        (
            ["model.fp16.safetensors"],
            f"safetensors files of other names .*: rename a whole model to {SINGLE_FILE}",
        ),
        (["checkpoint-500", "checkpoint-1000"], "checkpoints of a training run ('checkpoint-1000')"),
        (["model.safetensors.incomplete"], "an unfinished download"),
        (["optimizer.pt", "notes.md"], "it holds 'notes.md', 'optimizer.pt'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_a_directory_without_a_usable_checkpoint_lists_what_it_holds(
    files: list[str], says: str, tmp_path: Path
) -> None:
    for file in files:
        (tmp_path / file).touch()
    expected = says if ".*" in says else re.escape(says)
    with pytest.raises(CheckpointError, match=expected) as caught:
        Checkpoint.open(tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    kind = re.escape("it holds 'config.json'") if says.startswith("it ") else expected
    with pytest.raises(CheckpointError, match=kind):
        Checkpoint.open(tmp_path)


def test_a_checkpoint_one_directory_below_is_named(whole: Path) -> None:
    with pytest.raises(CheckpointError, match="a checkpoint in 'whole': give that directory"):
        Checkpoint.open(whole.parent)


def test_a_pointer_of_git_and_a_link_to_nothing_are_named(whole: Path) -> None:
    file = whole / SINGLE_FILE
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 5\n")
    with pytest.raises(CheckpointError, match="run `git lfs pull`"):
        Checkpoint.open(whole)
    file.unlink()
    file.symlink_to("../blobs/gone")
    with pytest.raises(CheckpointError, match="a link to a file that is gone"):
        Checkpoint.open(whole)


def test_an_index_of_another_save_is_named(sharded: Path) -> None:
    shard_of(sharded, 2).rename(sharded / "model-00002-of-00002.safetensors")
    with pytest.raises(
        CheckpointError, match=r"names 'model-00002-of-00003.safetensors', which is not there, and not '"
    ):
        Checkpoint.open(sharded)


def test_failures_of_libraries_are_one_line_and_others_pass() -> None:
    class PanicException(BaseException):
        """As PyO3 raises for a panic of Rust code."""

    for failure in (
        AttributeError("a\nb"),
        Exception("\ud800\x1b"),
        RecursionError(),
        ImportError(),
        PanicException("p"),
    ):
        with pytest.raises(CheckpointError) as caught, failures_as(CheckpointError):
            raise failure
        assert str(caught.value).startswith(f"{type(failure).__name__}: ")
        assert str(caught.value).isprintable()
        assert caught.value.__cause__ is failure
    passing = (KeyboardInterrupt, SystemExit, MemoryError, lambda: RuntimeError("CUDA out of memory"))
    for make in (*passing, lambda: UsageError("own")):
        error = make()
        with pytest.raises(type(error)) as passed, failures_as(CheckpointError):
            raise error
        assert passed.value is error
    with (
        pytest.raises(CheckpointError, match=r"OSError: no \(path\)$"),
        failures_as(CheckpointError, hides_paths=True),
    ):
        raise OSError("no '/etc/secret'")
