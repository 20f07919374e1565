"""Print the files that a fit, an upload and a request pass through: `python -m tests.ways [REVISION]`."""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tests.replay.source_tree import ROOT, SourceTree
from tests.server.helpers.live_server import make_artifacts
from tests.ways.recorder import record


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.ways", description=__doc__)
    parser.add_argument("revision", nargs="?", help="a commit; without it, the working tree")
    args = parser.parse_args()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        source = SourceTree(ROOT)
        if args.revision is not None:
            source = SourceTree.of_revision(args.revision, scratch / "source")
        ways = record(source, make_artifacts(scratch / "inputs"), scratch / "work")
        for title, way in (("fit", ways.fit), ("upload", ways.upload), ("request", ways.request)):
            num_lines = sum(len((source.directory / file).read_text().splitlines()) for file in way.files)
            print(f"{title}: {len(way.files)} files, {num_lines} lines")
            for call in way.calls:
                print(f"  {call.process:30} {'*' if call.file in way.idle else ' '} {call.file}")


if __name__ == "__main__":
    main()
