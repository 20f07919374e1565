"""`peraxis push-hub` against a stand-in for the hub: what arrives there, and one line for everything that fails."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, constants

from client.publishing import fetched_from_hub
from compressor.config import CompressConfig
from compressor.pipeline import compress
from peraxis.cli import run
from tests.helpers.hub import Hub, Repository, asked_hub, commit_of
from tests.helpers.tiny_models import make_pair

Captured = pytest.CaptureFixture[str]

TOKEN, OTHER = "hf_writes", "hf_reads"
NAME = "tuned.safetensors"


@pytest.fixture(scope="module")
def delta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact beside the card that `compress` wrote of it."""
    directory = tmp_path_factory.mktemp("delta")
    models = make_pair("llama", directory)
    compress(
        CompressConfig(
            str(models.base), str(models.finetunes[0]), directory / NAME, report=directory / "card"
        )
    )
    return directory / NAME


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with asked_hub(monkeypatch, tmp_path / "cache") as running:
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        # Pauses between attempts of huggingface_hub.
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        running.known = {TOKEN, OTHER}
        running.repositories["acme/own"] = Repository(commit_of({".gitattributes": b"x"}), writer=TOKEN)
        yield running


def push(delta: Path, repo: str, capsys: Captured, *flags: str, code: int = 0) -> Any:
    """Run the command with --json; return its document, or its one line."""
    capsys.readouterr()
    assert run(["push-hub", str(delta), repo, "--no-progress", "--json", *flags]) == code
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    if code:
        return document["error"]["message"]
    return {**document, "said": captured.err}


def test_the_artifact_and_its_card_arrive_in_one_commit(delta: Path, hub: Hub, capsys: Captured) -> None:
    repository = hub.repositories["acme/own"]
    result = push(delta, "acme/own", capsys, "--base-model", "acme/base")
    assert len(repository.commits) == 2
    assert repository.files[NAME] == delta.read_bytes()
    assert repository.files[".gitattributes"] == b"x"
    card = ModelCard(repository.files["README.md"].decode())
    assert (card.data.get("library_name"), card.data.get("base_model")) == ("peraxis", "acme/base")
    assert card.data.get("tags") == ["peraxis", "delta", "1-bit"]
    digest = hashlib.sha256(delta.read_bytes()).hexdigest()
    assert digest in card.text
    commit = list(repository.commits)[-1]
    assert result == {
        "url": f"{hub.url}/acme/own/commit/{commit}", "commit": commit, "digest": f"sha256:{digest}",
        "size_bytes": delta.stat().st_size, "has_card": True, "said": "",
    }  # fmt: skip
    assert fetched_from_hub(f"hf://acme/own@{commit}", progress=False).read_bytes() == delta.read_bytes()


def test_people_see_the_command_that_publishes_it(delta: Path, hub: Hub, capsys: Captured) -> None:
    assert run(["push-hub", str(delta), "acme/own"]) == 0
    captured = capsys.readouterr()
    commit = list(hub.repositories["acme/own"].commits)[-1]
    assert captured.out.splitlines()[0].startswith(f"{hub.url}/acme/own/commit/{commit}  ")
    assert captured.out.splitlines()[1].endswith(f"peraxis push hf://acme/own@{commit}:{NAME} --name NAME")
    assert captured.err == ""


def test_a_card_without_the_fine_tune_s_size_does_not_invent_it(
    delta: Path, hub: Hub, capsys: Captured
) -> None:
    push(delta, "acme/own", capsys)
    card = hub.repositories["acme/own"].files["README.md"].decode()
    assert "times smaller" not in card
    assert "as in the base" not in card
    assert "base_model" not in card


def test_the_card_that_compress_wrote_can_be_taken(delta: Path, hub: Hub, capsys: Captured) -> None:
    push(delta, "acme/own", capsys, "--card", str(delta.parent / "card"), "--base-model", "acme/base")
    card = ModelCard(hub.repositories["acme/own"].files["README.md"].decode())
    assert "times smaller" in card.text
    assert card.data.get("base_model") == "acme/base"
    assert card.text.strip() == ModelCard.load(delta.parent / "card" / "README.md").text.strip()


def test_a_second_push_replaces_the_card_of_the_first(delta: Path, hub: Hub, capsys: Captured) -> None:
    push(delta, "acme/own", capsys)
    assert push(delta, "acme/own", capsys, "--base-model", "acme/base")["has_card"]
    assert "acme/base" in hub.repositories["acme/own"].files["README.md"].decode()


def test_a_readme_of_the_user_s_own_stays_unless_told(delta: Path, hub: Hub, capsys: Captured) -> None:
    repository = hub.repositories["acme/own"]
    repository.commits.update(commit_of({"README.md": b"# Mine"}))
    result = push(delta, "acme/own", capsys)
    assert not result["has_card"]
    assert result["said"].count("\n") == 1
    assert "--replace-card" in result["said"]
    assert repository.files["README.md"] == b"# Mine"
    assert repository.files[NAME] == delta.read_bytes()
    assert push(delta, "acme/own", capsys, "--replace-card")["has_card"]
    assert repository.files["README.md"] != b"# Mine"


def test_a_repository_is_made_only_when_told_and_is_private(delta: Path, hub: Hub, capsys: Captured) -> None:
    line = push(delta, "acme/new", capsys, code=1)
    assert "no such repository that this token may see" in line
    assert line.endswith("or give --create")
    assert "acme/new" not in hub.repositories
    push(delta, "acme/new", capsys, "--create")
    assert hub.repositories["acme/new"].token == TOKEN
    assert hub.repositories["acme/new"].files[NAME] == delta.read_bytes()
    # One that is there is used as it is.
    push(delta, "acme/own", capsys, "--create")
    assert hub.repositories["acme/own"].token is None


def test_without_a_token_nothing_is_asked(
    delta: Path, hub: Hub, capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    line = push(delta, "acme/own", capsys, code=4)
    assert line == "acme/own: there is no token: set HF_TOKEN, or run `hf auth login`"
    assert hub.requests == []
    # `hf auth login` stores it there.
    (tmp_path / "token").write_text(TOKEN)
    push(delta, "acme/own", capsys)


@pytest.mark.parametrize(
    ("token", "repo", "code", "message"),
    [
        ("hf_expired", "acme/own", 4, "does not know this token (401): set HF_TOKEN"),
        (OTHER, "acme/own", 4, "this token may not write there (403): give it the right"),
        (TOKEN, "acme/absent", 1, "no such repository that this token may see (401): check the name"),
        (TOKEN, "acme/hidden", 1, "no such repository that this token may see (401): check the name"),
    ],
)
def test_a_hub_that_refuses_is_one_line(
    token: str,
    repo: str,
    code: int,
    message: str,
    delta: Path,
    hub: Hub,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub.repositories["acme/hidden"] = Repository(commit_of({}), token="hf_another")
    monkeypatch.setenv("HF_TOKEN", token)
    line = push(delta, repo, capsys, code=code)
    assert line.startswith(f"{repo}: ")
    assert message in line
    assert len(hub.repositories["acme/own"].commits) == 1


@pytest.mark.parametrize(
    ("route", "status", "message"),
    [
        ("preupload", 429, "limits requests of this token (429): run the same command again in"),
        ("batch", 429, "limits requests of this token (429)"),
        ("commit", 429, "limits requests of this token (429)"),
        ("commit", 404, "no such repository that this token may see (404)"),
        ("preupload", 500, "refuses the upload (500: "),
        ("batch", 507, "refuses the upload (507: "),
        ("commit", 412, "refuses the upload (412: "),
    ],
)
def test_a_call_of_the_upload_that_fails_is_one_line_and_changes_nothing(
    route: str, status: int, message: str, delta: Path, hub: Hub, capsys: Captured
) -> None:
    repository = hub.repositories["acme/own"]
    repository.failing = {route: status}
    line = push(delta, "acme/own", capsys, code=1)
    assert message in line
    assert len(repository.commits) == 1
    # The way out that the line names.
    repository.failing = {}
    push(delta, "acme/own", capsys)
    assert repository.files[NAME] == delta.read_bytes()


def test_an_upload_that_is_cut_once_is_sent_again(delta: Path, hub: Hub, capsys: Captured) -> None:
    hub.repositories["acme/own"].num_cuts = 1
    push(delta, "acme/own", capsys)
    assert hub.repositories["acme/own"].files[NAME] == delta.read_bytes()


def test_an_upload_that_is_cut_ever_again_is_one_line(delta: Path, hub: Hub, capsys: Captured) -> None:
    repository = hub.repositories["acme/own"]
    repository.num_cuts = 100
    line = push(delta, "acme/own", capsys, code=1)
    assert line.startswith("acme/own: the upload broke off (")
    assert line.endswith("the repository is as it was: run the same command again")
    assert len(repository.commits) == 1
    repository.num_cuts = 0
    push(delta, "acme/own", capsys)
    assert repository.files[NAME] == delta.read_bytes()


def test_without_a_network_the_line_says_so(
    delta: Path, hub: Hub, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "the upload broke off (ConnectError: " in push(delta, "acme/own", capsys, code=1)


def test_what_cannot_be_uploaded_is_refused_before_the_hub_is_asked(
    delta: Path, hub: Hub, capsys: Captured, tmp_path: Path
) -> None:
    damaged, renamed, foreign = (tmp_path / name for name in ("cut.safetensors", "tuned.bin", "card"))
    damaged.write_bytes(delta.read_bytes()[:-7])
    renamed.write_bytes(delta.read_bytes())
    foreign.mkdir()
    (foreign / "README.md").write_text("# Another")
    for code, message, args in (
        (1, "cut.safetensors", [str(damaged), "acme/own"]),
        (1, "gone.safetensors", [str(tmp_path / "gone.safetensors"), "acme/own"]),
        (2, "tuned.bin: servers look for a name that ends in .safetensors", [str(renamed), "acme/own"]),
        (2, "'own': its owner is missing: give ORG/REPO", [str(delta), "own"]),
        (2, "'acme/own/x': it is no id of a hub: give ORG/REPO", [str(delta), "acme/own/x"]),
        (2, "--base-model 'base': its owner is missing", [str(delta), "acme/own", "--base-model", "base"]),
        (2, "is not the card of", [str(delta), "acme/own", "--card", str(foreign)]),
        (2, "README.md: No such file", [str(delta), "acme/own", "--card", str(tmp_path)]),
    ):
        capsys.readouterr()
        assert run(["push-hub", *args]) == code
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1
        assert message in captured.err
        assert captured.out == ""
    assert hub.requests == []
