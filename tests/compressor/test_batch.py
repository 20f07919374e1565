"""`peraxis compress --all`: many deltas of one base, each as a run of its own makes it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

import compressor.batch
import compressor.pipeline
import compressor.resume
from compressor.batch import compress_all, read_batch
from compressor.config import CompressConfig, config_of
from compressor.pipeline import OpenedBase, compress
from deltastore.base import Base
from deltastore.checkpoint import Checkpoint
from deltastore.console import identify_base
from peraxis.cli import run
from tests.compressor.helpers.compressing import rewrite
from tests.helpers.hub import Hub, asked_hub
from tests.helpers.tiny_models import CHAT_TEMPLATE, Change, TinyModels, make_pair, make_tokenizer

Captured = pytest.CaptureFixture[str]

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["alpha", "beta", "gamma"]
FIT: dict[str, Any] = {"samples": 12, "distill_epochs": 1}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """A base with a tokenizer and three fine-tunes, one of them with added tokens, whose files are checked."""
    changes = (Change(), Change(added_tokens=2), Change())
    made = make_pair("llama", tmp_path_factory.mktemp("models"), changes=changes)
    make_tokenizer().save_pretrained(made.base)
    return made


def toml_of(value: object) -> str:
    return json.dumps(value) if not isinstance(value, Path) else json.dumps(str(value))


def batch_file(
    directory: Path, models: TinyModels, tables: dict[str, dict[str, Any]] | None = None, **common: Any
) -> Path:
    """Write a file of the fine-tunes; `tables` has the options of each."""
    file = directory / "finetunes.toml"
    lines = [f"{key} = {toml_of(value)}" for key, value in {
        "base": models.base, "out": directory / "deltas", **common
    }.items()]  # fmt: skip
    for name, finetune in zip(NAMES, models.finetunes, strict=False):
        own = {"finetune": finetune, **(tables or {}).get(name, {})}
        lines += [f"[finetunes.{name}]", *(f"{key} = {toml_of(value)}" for key, value in own.items())]
    file.write_text("\n".join(lines))
    return file


def result_of(file: Path, capsys: Captured, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert run(["compress", "--all", str(file), "--json", "--no-progress"]) == code
    return {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}


def states(file: Path, capsys: Captured, code: int = 0) -> list[str]:
    return [entry["state"] for entry in result_of(file, capsys, code).values()]


def test_each_file_is_that_of_a_single_run(models: TinyModels, tmp_path: Path, capsys: Captured) -> None:
    tables: dict[str, dict[str, Any]] = {
        "alpha": {"method": "both", **FIT},
        "beta": {"calibration": "none", "method": "scalar", "embeddings": "whole"},
        "gamma": {
            "recipe": "paper",
            "samples": 16,
            "distill-epochs": 1,
            "seed": 3,
            "report": tmp_path / "card",
        },
    }
    found = result_of(batch_file(tmp_path, models, tables), capsys)
    assert list(found) == NAMES
    for name, finetune in zip(NAMES, models.finetunes, strict=True):
        options = {key.replace("-", "_"): value for key, value in tables[name].items() if key != "report"}
        options["text"] = options.pop("calibration", "self")
        alone = tmp_path / f"{name}.safetensors"
        single = compress(config_of(base=str(models.base), finetune=str(finetune), out=alone, **options))
        assert Path(found[name]["out"]) == tmp_path / "deltas" / f"{name}.safetensors"
        assert Path(found[name]["out"]).read_bytes() == alone.read_bytes()
        assert found[name]["digest"] == f"sha256:{single.digest}"
        assert found[name]["full_bytes"] == single.full_bytes
    assert (tmp_path / "card" / "README.md").is_file()
    assert sorted(os.listdir(tmp_path / "deltas")) == [
        "alpha.safetensors", "beta.safetensors", "finished.json", "gamma.safetensors",
    ]  # fmt: skip


def test_forty_fine_tunes_hash_and_open_the_base_once(
    models: TinyModels, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "finetunes.toml"
    tables = [
        f'[finetunes.v{number}]\nfinetune = "{models.finetunes[number % 2 * 2]}"' for number in range(40)
    ]
    file.write_text(
        "\n".join([f'base = "{models.base}"\nout = "{tmp_path / "out"}"\ncalibration = "none"', *tables])
    )
    hashed, opened = [], []
    open_checkpoint = Checkpoint.open

    def counted(found: Any, progress: bool) -> Base:
        hashed.append(found.path)
        return identify_base(found, progress)

    def counted_open(path: Path) -> Any:
        opened.append(path)
        return open_checkpoint(path)

    monkeypatch.setattr(compressor.pipeline, "identify_base", counted)
    monkeypatch.setattr(Checkpoint, "open", counted_open)
    assert states(file, capsys) == ["made"] * 40
    assert hashed == [models.base]
    assert opened.count(models.base) == 1
    assert states(file, capsys) == ["kept"] * 40
    assert hashed == [models.base] * 2


def test_what_is_finished_is_known_by_its_content(
    models: TinyModels, tmp_path: Path, capsys: Captured
) -> None:
    copies = TinyModels(tmp_path / "base", [tmp_path / name for name in NAMES])
    for source, copy in zip([models.base, *models.finetunes], [copies.base, *copies.finetunes], strict=True):
        shutil.copytree(source, copy)
    file = batch_file(tmp_path, copies, calibration="none")
    made = {name: entry["digest"] for name, entry in result_of(file, capsys).items()}
    assert states(file, capsys) == ["kept"] * 3
    # A damaged artifact, a fine-tune with other weights and one with another template, each of the same name.
    artifact = tmp_path / "deltas" / "alpha.safetensors"
    content = artifact.read_bytes()
    artifact.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    rewrite(copies.finetunes[1], lambda tensors: tensors["model.norm.weight"].add_(1))
    found = result_of(file, capsys)
    assert [entry["state"] for entry in found.values()] == ["made", "made", "kept"]
    assert found["alpha"]["digest"] == made["alpha"]
    assert found["beta"]["digest"] != made["beta"]
    (copies.finetunes[2] / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    assert states(file, capsys) == ["kept", "kept", "made"]
    assert states(batch_file(tmp_path, copies, {"beta": {"method": "scalar"}}, calibration="none"), capsys) == [
        "kept", "made", "kept",
    ]  # fmt: skip
    artifact.unlink()
    (tmp_path / "deltas" / "finished.json").write_text("[]")
    assert states(file, capsys) == ["made"] * 3
    rewrite(copies.base, lambda tensors: tensors["model.norm.weight"].add_(1))
    assert states(file, capsys) == ["made"] * 3


def test_text_that_has_changed_in_its_file_counts(
    models: TinyModels, tmp_path: Path, capsys: Captured
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox. " * 200)
    one = TinyModels(models.base, models.finetunes[:1])
    file = batch_file(tmp_path, one, calibration=text, **FIT)
    assert states(file, capsys) == ["made"]
    assert states(file, capsys) == ["kept"]
    text.write_text("The lazy black dog. " * 200)
    assert states(file, capsys) == ["made"]


def test_a_card_that_is_gone_is_written_again(models: TinyModels, tmp_path: Path, capsys: Captured) -> None:
    one = TinyModels(models.base, models.finetunes[:1])
    file = batch_file(tmp_path, one, {"alpha": {"report": tmp_path / "card"}}, calibration="none")
    assert states(file, capsys) == ["made"]
    (tmp_path / "card" / "README.md").unlink()
    assert states(file, capsys) == ["made"]
    assert (tmp_path / "card" / "README.md").is_file()
    assert states(file, capsys) == ["kept"]


def test_a_bar_that_is_raised_later_fails_a_finished_delta(
    models: TinyModels, tmp_path: Path, capsys: Captured
) -> None:
    one = TinyModels(models.base, models.finetunes[:1])
    assert states(batch_file(tmp_path, one, **FIT), capsys) == ["made"]
    file = batch_file(tmp_path, one, **FIT, **dict[str, Any]({"min-agreement": 1.0}))
    (entry,) = result_of(file, capsys, code=1).values()
    assert entry["state"] == "failed"
    assert "less than `min_agreement` 100.00%" in entry["error"]


def test_one_that_fails_is_named_and_the_others_are_made(
    models: TinyModels, tmp_path: Path, capsys: Captured
) -> None:
    shutil.copytree(models.finetunes[1], tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"no tensors")
    three = TinyModels(models.base, [models.finetunes[0], tmp_path / "broken", tmp_path / "gone"])
    file = batch_file(tmp_path, three, calibration="none")
    capsys.readouterr()
    assert run(["compress", "--all", str(file), "--no-progress"]) == 1
    captured = capsys.readouterr()
    assert [line.partition(": ")[0] for line in captured.err.splitlines()] == ["beta", "gamma"]
    assert "gone: no such directory" in captured.err
    rows = [line.split() for line in captured.out.splitlines()]
    assert [row[:2] for row in rows] == [
        ["NAME", "STATE"], ["alpha", "made"], ["beta", "failed"], ["gamma", "failed"],
    ]  # fmt: skip
    assert rows[1][-1] == str(tmp_path / "deltas" / "alpha.safetensors")
    assert sorted(os.listdir(tmp_path / "deltas")) == ["alpha.safetensors", "finished.json"]


KILLED = """
import os, signal, sys
import torch
from compressor.resume import CheckpointStore
from peraxis.cli import run
# As the tests do; sums of several threads round otherwise.
torch.set_num_threads(1)
save, left = CheckpointStore.save, int(sys.argv[1])

def counted(self, stage, state):
    global left
    save(self, stage, state)
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)

CheckpointStore.save = counted
sys.exit(run(sys.argv[2:]))
"""


def test_after_kill_9_the_same_command_goes_on(
    models: TinyModels, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = TinyModels(models.base, models.finetunes[:2])
    file = batch_file(tmp_path, two, **FIT)
    command = ["compress", "--all", str(file), "--no-progress"]
    # Each fit of these two blocks keeps its text, two blocks, the layers and an epoch.
    killed = subprocess.run([sys.executable, "-c", KILLED, "8", *command], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    deltas = tmp_path / "deltas"
    assert (deltas / "alpha.safetensors").is_file()
    assert not (deltas / "beta.safetensors").exists()
    before = {path.name: path.stat().st_mtime_ns for path in deltas.glob("beta.safetensors.progress/*.pt")}
    assert before
    written = []
    save = compressor.resume.CheckpointStore.save

    def noted(self: Any, stage: str, state: Any) -> None:
        written.append(f"{stage}.pt")
        save(self, stage, state)

    monkeypatch.setattr(compressor.resume.CheckpointStore, "save", noted)
    assert states(file, capsys) == ["kept", "made"]
    # What was done is not done again.
    assert not before.keys() & set(written)
    for name, finetune in zip(NAMES, two.finetunes, strict=False):
        alone = tmp_path / f"{name}.safetensors"
        compress(config_of(base=str(two.base), finetune=str(finetune), out=alone, **FIT))
        assert (deltas / f"{name}.safetensors").read_bytes() == alone.read_bytes()
    assert sorted(os.listdir(deltas)) == ["alpha.safetensors", "beta.safetensors", "finished.json"]


def test_progress_of_other_settings_is_neither_used_nor_lost(
    models: TinyModels, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = TinyModels(models.base, models.finetunes[:1])
    command = ["compress", "--all", str(batch_file(tmp_path, one, **FIT)), "--no-progress"]
    save, saved = compressor.resume.CheckpointStore.save, list[str]()

    def interrupted(self: Any, stage: str, state: Any) -> None:
        save(self, stage, state)
        saved.append(stage)
        if len(saved) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(compressor.resume.CheckpointStore, "save", interrupted)
        assert run(command) == 130
    progress = tmp_path / "deltas" / "alpha.safetensors.progress"
    before = sorted(os.listdir(progress))
    assert {f"{stage}.pt" for stage in saved} < {*before}
    (entry,) = result_of(batch_file(tmp_path, one, **{**FIT, "samples": 13}), capsys, code=1).values()
    assert entry["error"].startswith(f"{progress}: it was left by a run with other inputs or settings")
    assert entry["error"].endswith("or remove it to begin anew")
    assert sorted(os.listdir(progress)) == before


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with asked_hub(monkeypatch, tmp_path / "cache") as hub:
        yield hub


def weights_in(cache: Path) -> list[str]:
    """The models whose weights are in a hub's cache."""
    return sorted({path.parts[-4] for path in cache.rglob("model.safetensors") if path.exists()})


def test_one_checkpoint_of_a_hub_is_on_disk_at_a_time(
    models: TinyModels, hub: Hub, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [hub.add_directory(name, finetune) for name, finetune in zip(NAMES, models.finetunes, strict=True)]
    # One that was in the cache before stays there.
    huggingface_hub.snapshot_download(ids[2])
    file = batch_file(tmp_path, TinyModels(models.base, [Path(each) for each in ids]), calibration="none")
    seen = []

    def observed(*args: Any) -> Any:
        result = compress(*args)
        seen.append(weights_in(tmp_path / "cache"))
        return result

    monkeypatch.setattr(compressor.batch, "compress", observed)
    assert states(file, capsys) == ["made"] * 3
    kept = "models--acme--gamma"
    assert seen == [["models--acme--alpha", kept], ["models--acme--beta", kept], [kept]]
    assert weights_in(tmp_path / "cache") == [kept]
    fetched = len(hub.requests)
    assert states(file, capsys) == ["kept"] * 3
    asked = hub.requests[fetched:]
    assert not [path for way, path in asked if way == "GET" and path.endswith("model.safetensors")]


def test_what_a_killed_run_fetched_is_used_and_removed_by_the_next(
    models: TinyModels, hub: Hub, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [hub.add_directory(name, finetune) for name, finetune in zip(NAMES, models.finetunes, strict=True)]
    file = batch_file(tmp_path, TinyModels(models.base, [Path(each) for each in ids]), calibration="none")

    def killed(config: CompressConfig, base: OpenedBase) -> Any:
        if config.finetune == ids[1]:
            huggingface_hub.snapshot_download(config.finetune)
            raise KeyboardInterrupt
        return compress(config, base)

    with monkeypatch.context() as patched:
        patched.setattr(compressor.batch, "compress", killed)
        # A killed run does nothing at its end.
        patched.setattr(compressor.batch.Record, "forget_fetched", lambda self: None)
        with pytest.raises(KeyboardInterrupt):
            compress_all(read_batch(file))
    assert "models--acme--beta" in weights_in(tmp_path / "cache")
    fetched = len(hub.requests)
    assert states(file, capsys) == ["kept", "made", "made"]
    asked = hub.requests[fetched:]
    assert not [
        path for way, path in asked if way == "GET" and "beta" in path and path.endswith("model.safetensors")
    ]
    assert weights_in(tmp_path / "cache") == []


def test_a_rival_that_is_asked_for_later_is_measured_and_the_delta_is_kept(
    models: TinyModels, tmp_path: Path, capsys: Captured
) -> None:
    one = TinyModels(models.base, models.finetunes[:1])
    card = {"alpha": {"report": tmp_path / "card"}}
    before = result_of(batch_file(tmp_path, one, card, **FIT), capsys)["alpha"]
    assert "rival" not in before
    artifact = tmp_path / "deltas" / "alpha.safetensors"
    changed = artifact.stat().st_mtime_ns
    assert "| LoRA |" not in (tmp_path / "card" / "README.md").read_text()

    file = batch_file(tmp_path, one, card, rival="lora", **FIT)
    later = result_of(file, capsys)["alpha"]
    assert (later["state"], artifact.stat().st_mtime_ns) == ("kept", changed)
    assert later["fidelity"] == before["fidelity"]
    assert "| LoRA |" in (tmp_path / "card" / "README.md").read_text()
    # Given again, it is known.
    (tmp_path / "card" / "README.md").write_bytes(b"the same card")
    assert result_of(file, capsys)["alpha"]["rival"] == later["rival"]
    assert (tmp_path / "card" / "README.md").read_bytes() == b"the same card"

    (tmp_path / "anew").mkdir()
    anew = result_of(batch_file(tmp_path / "anew", one, rival="lora", **FIT), capsys)["alpha"]
    assert (anew["state"], anew["rival"]) == ("made", later["rival"])
    assert "rival" not in result_of(batch_file(tmp_path, one, card, **FIT), capsys)["alpha"]


def test_the_table_sets_each_delta_beside_its_rival(
    models: TinyModels, tmp_path: Path, capsys: Captured
) -> None:
    two = TinyModels(models.base, models.finetunes[:2])
    file = str(batch_file(tmp_path, two, {"alpha": {"rival": "lora"}}, **FIT))
    capsys.readouterr()
    assert run(["compress", "--all", file, "--no-progress"]) == 0
    head, *rows = (re.split("  +", line.strip()) for line in capsys.readouterr().out.splitlines())
    assert head == [
        "NAME", "STATE", "SIZE", "SMALLER", "KL", "AGREEMENT", "GAIN", "LORA KL", "LORA AGREEMENT", "LORA GAIN",
        "WEIGHT ERROR", "SECONDS", "FILE",
    ]  # fmt: skip
    alpha, beta = (dict(zip(head, row, strict=True)) for row in rows)
    found = result_of(Path(file), capsys)
    rival, fidelity = found["alpha"]["rival"], found["alpha"]["fidelity"]
    assert alpha["LORA KL"] == f"{rival['kl']:.3g}"
    assert alpha["LORA AGREEMENT"] == f"{rival['agreement']:.2%}"
    assert alpha["LORA GAIN"] == f"{100 * rival['kept']:.2f}%"
    assert alpha["GAIN"] == f"{100 - 100 * fidelity['held_out']['kl'] / fidelity['base']['kl']:.2f}%"
    assert {beta[name] for name in head if name.startswith("LORA")} == {"-"}


def test_a_fine_tune_of_a_hub_is_made_again_for_another_commit_alone(
    models: TinyModels, hub: Hub, tmp_path: Path, capsys: Captured
) -> None:
    base, tuned = hub.add_directory("base", models.base), hub.add_directory("alpha", models.finetunes[0])
    (commit,) = hub.repositories[tuned].commits
    hub.add_commit("alpha", models.finetunes[2], "v2")
    digests = {}
    for revision, expected in (
        (commit, "made"),
        (commit, "kept"),
        ("v2", "made"),
        ("main", "kept"),
        ("v9", "failed"),
    ):
        one = TinyModels(Path(f"{base}@main"), [Path(f"{tuned}@{revision}")])
        file = batch_file(tmp_path, one, calibration="none")
        (entry,) = result_of(file, capsys, code=int(expected == "failed")).values()
        assert entry["state"] == expected, revision
        digests[revision] = entry["digest"]
    assert entry["error"].startswith("acme/alpha@v9: the hub has acme/alpha, and no revision 'v9' of it")
    assert digests[commit] != digests["v2"] == digests["main"]


BAD: list[tuple[Callable[[str], str], str]] = [
    (lambda text: text.replace("calibration", "calibraton", 1), "unknown key 'calibraton': did you mean calibration?"),
    (lambda text: text + "\nmetod = 'scalar'", "finetunes.gamma: unknown key 'metod': did you mean method?"),
    (lambda text: text + "\nresume = true", "finetunes.gamma: unknown key 'resume'"),
    (lambda text: text + "\nout = 'x'", "finetunes.gamma: unknown key 'out'"),
    (lambda text: "report = 'card'\n" + text, "unknown key 'report': give it in the table of each fine-tune"),
    (lambda text: text + "\nsamples = 'many'", "finetunes.gamma: samples 'many': Input should be a valid integer"),
    (lambda text: text + "\nsamples = true", "finetunes.gamma: samples 'True': Input should be a valid integer"),
    (lambda text: text + "\nmethod = 'bothh'", "finetunes.gamma: method 'bothh': Input should be 'scalar'"),
    (lambda text: text + "\nany-base = 1", "finetunes.gamma: any-base '1': Input should be a valid boolean"),
    (lambda text: text + "\nreport = 2026-01-01", "finetunes.gamma: report '2026-01-01': write it as a text"),
    (lambda text: text + "\ncalibration = 'self'\nbudget = 0.5", "finetunes.gamma: --budget 0.5: it is over one bit"),
    (lambda text: text + "\nmin_agreement = 0.5\nmin-agreement = 0.6", "finetunes.gamma: min-agreement is there twice"),
    (lambda text: text + "\nbudget = 1.5", "finetunes.gamma: --budget does nothing without calibration text"),
    (lambda text: text + "\n[finetunes.'../x']\nfinetune = 'x'", "finetunes.../x: it names a file"),
    (lambda text: text + "\n[finetunes.x]\nmethod = 'both'", "finetunes.x: finetune is missing"),
    (lambda text: text + "\n[finetunes.x]\nfinetune = 3", "finetunes.x: finetune is '3'"),
    (lambda text: text + "\n[finetunes.gamma]", "finetunes.toml: it is no TOML"),
    (lambda text: text.split("[")[0], "finetunes.toml: it has no fine-tune"),
    (lambda text: text.split("[")[0] + "\nfinetunes = 3", "finetunes.toml: it has no fine-tune"),
    (lambda text: text.split("[")[0] + "\nfinetunes.x = 'dir'", "finetunes.x: it is no table"),
    (lambda text: text.replace("base =", "bse =", 1), "unknown key 'bse': did you mean base?"),
    (lambda text: "\n".join(text.splitlines()[1:]), "finetunes.toml: base is missing"),
    (
        lambda text: text.replace("[finetunes.beta]", "report = 'c'\n[finetunes.beta]\nreport = 'c'"),
        "finetunes.beta: report c is that of alpha",
    ),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(BAD)))
def test_a_file_that_is_wrong_is_one_line_and_nothing_is_made(
    number: int, models: TinyModels, tmp_path: Path, capsys: Captured
) -> None:
    change, message = BAD[number]
    file = batch_file(tmp_path, models, calibration="none")
    file.write_text(change(file.read_text()))
    capsys.readouterr()
    assert run(["compress", "--all", str(file), "--no-progress"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert captured.out == ""
    assert not (tmp_path / "deltas").exists()


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "latin.toml").write_bytes("base = 'é'".encode("latin-1"))
    for name, message in (
        ("gone.toml", "gone.toml: No such file or directory: give a TOML file"),
        (".", "Is a directory: give a TOML file"),
        ("latin.toml", "latin.toml: it is no TOML"),
    ):
        assert run(["compress", "--all", str(tmp_path / name)]) == 2
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1
        assert message in captured.err


def test_flags_that_the_file_has_are_refused_beside_it(
    models: TinyModels, tmp_path: Path, capsys: Captured
) -> None:
    file = str(batch_file(tmp_path, models, calibration="none"))
    for flags in (["--base", "b"], ["--samples", "4"], ["--calibration", "none"], ["--resume"], ["--plan"]):
        assert run(["compress", "--all", file, *flags]) == 2
        assert f"{flags[0]} does nothing beside --all" in capsys.readouterr().err
    assert run(["compress", "--base", "b"]) == 2
    assert "--finetune and --out missing" in capsys.readouterr().err


def test_a_base_that_cannot_be_read_ends_the_command(
    models: TinyModels, tmp_path: Path, capsys: Captured
) -> None:
    gone = TinyModels(tmp_path / "gone", models.finetunes)
    capsys.readouterr()
    assert run(["compress", "--all", str(batch_file(tmp_path, gone, calibration="none"))]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {tmp_path / 'gone'}: no such directory")
    assert captured.err.count("\n") == 1
