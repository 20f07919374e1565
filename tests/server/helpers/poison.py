"""An engine that dies at requests of the tests' choice: the environment in which a server's engine has such a fault."""

from __future__ import annotations

import os
from pathlib import Path

# A prompt that ends with this token kills the engine when it is computed beyond `POISON_TOKENS` tokens.
POISON_TOKEN, POISON_TOKENS = 251, 12
# Python imports a module of this name at its start. It waits for the engine's core, and has its step die.
SITECUSTOMIZE = f"""
import os, signal, sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != "server.engine.core":
            return None
        spec = PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            note = module.EngineCore._note_step
            def note_and_die(self, plan):
                note(self, plan)
                if any(s.prompt_ids[-1] == {POISON_TOKEN} and s.num_tokens > {POISON_TOKENS} for s in plan.batch):
                    os.kill(os.getpid(), signal.SIGKILL)
            module.EngineCore._note_step = note_and_die
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder)
"""


def poisoned_environment(directory: Path) -> dict[str, str]:
    """Return variables for a server whose engine dies at poisoned requests."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(SITECUSTOMIZE)
    paths = [str(directory), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}
