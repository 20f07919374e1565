"""One source tree while it is asked, with its inputs, a directory of its own and a transcript."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.replay.inputs import ReplayInputs
from tests.replay.source_tree import CommandOutcome, SourceTree
from tests.replay.transcript import Transcript, steady


@dataclass(frozen=True, slots=True)
class World:
    """One source tree with its inputs."""

    source: SourceTree
    inputs: ReplayInputs
    directory: Path
    transcript: Transcript

    def command(self, title: str, *args: object, **variables: str) -> CommandOutcome:
        """Run a command and keep its exit code and what it printed; of errors the last line, behind any progress."""
        outcome = self.source.run(*args, **variables)
        try:
            output = json.dumps(steady(outcome.document()), indent=1)
        except ValueError:
            output = outcome.output
        last = outcome.errors.strip().rpartition("\n")[2]
        self.transcript.add(f"{title}: peraxis", f"exit {outcome.exit_code}\n{output}\n{last}\n")
        return outcome

    def make_keys(self, registry: Path, tenant: str, *roles: str) -> dict[str, str]:
        """Return a key of each role, without a server."""
        keys = {"": "", "wrong": "px_unknown"}
        for role in roles:
            # Keys are listed by the second in which they were made.
            time.sleep(1.1)
            made: Any = self.source.run(
                "keys", "create", "--registry", registry, "--tenant", tenant, "--role", role, "--json"
            ).document()
            keys[role] = made["key"]
            self.transcript.secrets[made["key"]] = f"KEY-{tenant}-{role}"
            self.transcript.secrets[made["id"]] = f"ID-{tenant}-{role}"
        return keys

    def keep_files(self, title: str, directory: Path) -> None:
        """Keep the names and sizes of a registry's files, and the text of its records."""
        files = (path for path in directory.rglob("*") if path.is_file())
        lines = (f"{path.relative_to(directory)}: {_content(path)}" for path in files)
        # Some names begin with ids.
        self.transcript.add(title, "\n".join(sorted(map(self.transcript.steady_text, lines))) + "\n")


def _content(path: Path) -> str:
    content = path.read_bytes()
    if len(content) >= 1 << 16 or path.parent.name == "objects":
        return f"{len(content)} bytes"
    try:
        documents = [steady(json.loads(line)) for line in content.decode().splitlines()]
    except ValueError:
        return repr(content)
    return json.dumps(documents)
