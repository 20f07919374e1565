"""Imports transformers without torch, which takes a third of the time and of the memory. Text needs no torch.

A process that never runs a model imports this module before anything that imports transformers. In a process that has
imported torch already, this module does nothing.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import cast

ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
# transformers imports its modules when their names are first used.
USED = {
    "transformers": ("AutoTokenizer", "GenerationConfig", "PreTrainedTokenizerFast"),
    "transformers.utils.chat_template_utils": ("render_jinja_template",),
}


def _import_transformers() -> None:
    """Import transformers while torch cannot be imported; transformers asks once and remembers the answer."""
    advice = os.environ.get(ADVICE)
    os.environ[ADVICE] = "1"
    # Python refuses to import a module that is None here.
    sys.modules["torch"] = cast(ModuleType, None)
    try:
        for module, names in USED.items():
            for name in names:
                getattr(importlib.import_module(module), name)
    finally:
        del sys.modules["torch"]
        os.environ.pop(ADVICE)
        if advice is not None:
            os.environ[ADVICE] = advice


if "torch" not in sys.modules:
    _import_transformers()
