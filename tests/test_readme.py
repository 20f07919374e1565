"""The README's commands and example run as they stand, in order, against a server of tiny models."""

from __future__ import annotations

import math
import os
import re
import select
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import httpx
import pytest

from bench.synthetic import LlamaShapes
from client.http import DEFAULT_URL
from compressor.config import CompressConfig
from compressor.pipeline import compress
from deltastore.format.sizes import one_bit_plan
from server.engine.build import CUDA_SHARE
from server.settings import Settings
from tests.helpers.tiny_models import CHAT_TEMPLATE, Change, make_pair, make_tokenizer
from tests.server.helpers.live_server import WAIT_S, clean_environment

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
INSTALL = ["pip", "install", "."]
# A fit is among the commands.
COMMAND_S = 900.0
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def blocks(language: str) -> str:
    """Return the text of all code blocks of a language."""
    return "".join(re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL))


def commands() -> list[list[str]]:
    """Return the words of every command of the README, without comments, as a shell divides them."""
    lines = blocks("sh").replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


class Visitor:
    """A directory with the files that the README takes for granted, in which its commands are run one by one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        # Any free port; commands after `serve` are given the one that it prints.
        self._environment = {**clean_environment(), "PATH": path, "PERAXIS_PORT": "0"}
        self._server: subprocess.Popen[str] | None = None
        self.url = ""

    def prepare(self) -> None:
        """Make ./base, ./my-finetune, and better.safetensors from another fine-tune."""
        changes = (Change(chat_template=CHAT_TEMPLATE),) * 2
        models = make_pair("llama", self.directory, changes=changes, num_hidden_layers=1)
        make_tokenizer(chat_template=CHAT_TEMPLATE).save_pretrained(models.base)
        models.finetunes[0].rename(self.directory / "my-finetune")
        out = self.directory / "better.safetensors"
        compress(CompressConfig(str(models.base), str(models.finetunes[1]), out, method="scalar"))

    def run(self, words: list[str]) -> str:
        """Run a program that ends, and return what it prints."""
        done = subprocess.run(
            words,
            cwd=self.directory,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"
        return done.stdout

    def serve(self, words: list[str]) -> str:
        """Start a server that goes on, and return the line that it prints when it is ready."""
        log = self.directory / "serve.log"
        with log.open("w") as errors:
            self._server = subprocess.Popen(
                words,
                cwd=self.directory,
                env=self._environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert self._server.stdout is not None
        assert select.select([self._server.stdout], [], [], WAIT_S)[0], log.read_text()
        line = self._server.stdout.readline()
        found = re.search(r"is served at (http://[^\s,]+)", line)
        assert found, f"{shlex.join(words)}\n{log.read_text()}"
        self.url = self._environment["PERAXIS_URL"] = found[1]
        return line

    def close(self) -> None:
        """Kill the server, if there is one."""
        if self._server is not None and self._server.stdout is not None:
            self._server.kill()
            self._server.wait()
            self._server.stdout.close()

    def versions(self) -> tuple[int, list[int]]:
        """Return the active version of `my` and all of its versions."""
        reply = httpx.get(f"{self.url}/variants/my", timeout=WAIT_S)
        assert reply.status_code == 200, reply.text
        variant = reply.json()
        return variant["active"], sorted(version["version"] for version in variant["versions"])


@pytest.fixture
def visitor(tmp_path: Path) -> Iterator[Visitor]:
    visitor = Visitor(tmp_path)
    try:
        yield visitor
    finally:
        visitor.close()


# Ten programs one after the other, a fit and a server's start among them.
@pytest.mark.timeout(1800)
def test_every_command_and_the_example_of_the_readme_run_in_order(visitor: Visitor) -> None:
    example = blocks("python")
    address = DEFAULT_URL.replace("127.0.0.1", "localhost")
    assert f'"{address}/v1"' in example, f"the example does not call the default address, {address}"
    visitor.prepare()
    done: list[str] = []
    for words in commands():
        if words[0] in ("make", "pip"):
            continue
        assert words[0] == "peraxis", f"this test cannot run {shlex.join(words)!r}"
        printed = visitor.serve(words) if words[1] == "serve" else visitor.run(words)
        done.append(words[1])
        check(visitor, words, printed, done)
    assert {"compress", "serve", "push", "chat", "rollback"} <= {*done}
    answer = visitor.run([sys.executable, "-c", example.replace(address, visitor.url)])
    assert answer.strip()


def check(visitor: Visitor, words: list[str], printed: str, done: list[str]) -> None:
    """Check what a command has done, and what it printed.

    Args:
        words: The command's.
        printed: Its standard output.
        done: The names of the commands so far, of this one, too.
    """
    assert printed.strip(), words
    match words[1]:
        case "compress":
            artifact = visitor.directory / words[words.index("--out") + 1]
            assert f"{artifact.name}  sha256:" in printed
            assert artifact.stat().st_size > 0
        case "serve":
            assert httpx.get(f"{visitor.url}/ready", timeout=WAIT_S).status_code == 200
        case "push":
            number = done.count("push")
            assert visitor.versions() == (number, list(range(1, number + 1)))
        case "chat":
            compared = words[words.index("--compare") + 1 :][:2] if "--compare" in words else []
            assert all(name in printed for name in compared)
        case "rollback":
            assert visitor.versions() == (1, [1, 2])
        case name:
            pytest.fail(f"check() does not say what `peraxis {name}` must have done")


def test_ci_runs_the_make_targets_of_the_readme() -> None:
    ci = "".join((ROOT / name).read_text() for name in (".ci/run", ".github/workflows/ci.yml"))
    targets = [words[1] for words in commands() if words[0] == "make"]
    assert targets == ["demo", "test"]
    assert not [name for name in targets if not re.search(rf"\bmake {name}$", ci, re.MULTILINE)]


def test_the_readme_installs_with_and_without_a_gpu() -> None:
    installs = [words for words in commands() if words[0] == "pip"]
    assert installs == [[*INSTALL, "--extra-index-url", CPU_INDEX], INSTALL]


def test_the_two_pictures_of_the_readme_differ_in_colours_alone() -> None:
    light, dark = (re.search(name, README) for name in (r'src="(\S+)"', r'srcset="(\S+)"'))
    assert light
    assert dark
    pictures = [(ROOT / found[1]).read_text() for found in (light, dark)]
    assert pictures[0] != pictures[1]
    assert len({re.sub(r"#[0-9a-f]{6}", "", picture) for picture in pictures}) == 1
    for picture in pictures:
        assert ElementTree.fromstring(picture).tag == "{http://www.w3.org/2000/svg}svg"


# Llama-3.1's.
SHAPES = {
    "8B": LlamaShapes(32, hidden=4096, intermediate=14336, kv=1024, vocabulary=128256, head_dim=128),
    "70B": LlamaShapes(80, hidden=8192, intermediate=28672, kv=1024, vocabulary=128256, head_dim=128),
}


def slots_beside(name: str, cards_gb: float) -> tuple[float, int]:
    """Return the gigabytes of a KV cache of 16 sequences of 4096 tokens, and the slots that fit beside it and the base.

    As `peraxis serve` divides memory: nine tenths of it, and 1.15 artifacts a slot.
    """
    shapes = SHAPES[name]
    plan = one_bit_plan(dict(shapes.tensors()))
    kv_bytes = 16 * 4096 * 2 * shapes.num_layers * shapes.kv * 2
    slot_bytes = plan.device_bytes * Settings.model_fields["slot_headroom"].default
    left = cards_gb * 1e9 * CUDA_SHARE - plan.full_bytes - kv_bytes
    return kv_bytes / 1e9, int(left // slot_bytes)


def test_the_cost_of_a_variant_and_the_slots_of_a_card_are_computed_from_the_format() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    costs = {name: one_bit_plan(dict(shapes.tensors())) for name, shapes in SHAPES.items()}
    gigabytes = [f"{plan.device_bytes / 1e9:.2f} GB" for plan in costs.values()]
    assert f"Llama-3.1-8B / 70B | {' / '.join(gigabytes)} | |" in README
    slots = slots_beside("8B", 80)[1], slots_beside("70B", 2 * 141)[1]
    assert f"8B on one card of 80 GB / 70B on two of 141 GB | {slots[0]} / {slots[1]} | |" in README
    rows = re.findall(
        r"^\| Llama-3.1-(8B|70B)[^|]* \| ([\d.]+) GB \| ([\d× ]+) GB \| (\d+) \|$", page, re.MULTILINE
    )
    assert len(rows) == 5
    for name, kv_gb, cards, number in rows:
        found_gb, found = slots_beside(name, math.prod(map(int, cards.split("×"))))
        assert (f"{found_gb:.1f}", found) == (kv_gb, int(number))
    whole = one_bit_plan(dict(SHAPES["70B"].tensors()), embeddings=False)
    full = whole.full_bytes / 1e9
    one, other = (
        f"{plan.device_bytes / 1e9:.2f} GB ({plan.full_bytes / plan.device_bytes:.1f}x)"
        for plan in (costs["70B"], whole)
    )
    assert f"| Llama-3.1-70B | {one} | {other} | {full:.2f} GB |" in page
