"""Modules and variables that the processes of a server take from the directory and the environment it starts in."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from peraxis.demo.service import running
from tests.server.helpers.live_server import Artifacts, LiveServer, live_server
from tests.server.helpers.worker_processes import workers_of

# Any of them may be the name of a user's own file.
NAMES = ("server", "client", "deltastore", "compressor", "demo", "peraxis", "torch", "msgspec", "tokenizers")
SECRETS = {
    "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "HF_TOKEN": "hf_secret",
    "OPENAI_API_KEY": "sk-secret",
    "PERAXIS_API_KEY": "pk-secret",
}
PROXY = {"HTTPS_PROXY": "http://user:password@127.0.0.1:9"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.fixture
def taken(tmp_path: Path) -> Path:
    """Make a directory where modules and packages, none of which can be imported, have these names."""
    directory = tmp_path / "taken"
    for number, name in enumerate(NAMES):
        file = directory / name / "__init__.py" if number % 2 else directory / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"raise SystemExit('imported {name} from the working directory')\n")
    return directory


def test_no_process_imports_from_the_working_directory_and_no_worker_gets_a_secret(
    artifacts: Artifacts, taken: Path, tmp_path: Path
) -> None:
    with live_server(
        artifacts.base,
        tmp_path / "registry",
        working_directory=taken,
        environment={**SECRETS, **PROXY},
    ) as server:
        use_every_kind_of_worker(server, artifacts)
        children = psutil.Process(server.process.pid).children()
        workers = [worker for child in children for worker in workers_of(child.pid)]
        kinds = {words[-1]: worker.environ() for worker in workers for words in [worker.cmdline()]}
        assert set(kinds) == {"server.grammar.matching", "deltastore.format.validate"}
        for kind, variables in kinds.items():
            assert not {*SECRETS, *PROXY} & set(variables), kind
            assert str(taken) not in variables.get("PYTHONPATH", "")


def use_every_kind_of_worker(server: LiveServer, artifacts: Artifacts) -> None:
    assert server.upload("third", artifacts.third).status_code == 201
    body = {
        "model": "third",
        "prompt": "hello",
        "max_tokens": 4,
        "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}},
    }
    reply = server.client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text


def test_the_demo_serves_from_such_a_directory(
    artifacts: Artifacts, taken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(taken)
    with running(artifacts.base, tmp_path / "registry", tmp_path / "log") as client:
        assert client.generate(None, {"prompt": "hello", "max_new_tokens": 1})["outputs"]
