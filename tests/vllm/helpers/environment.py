"""The interpreter that runs engines with vLLM, and sizes of models that vLLM runs on the CPU."""

from __future__ import annotations

import os
from typing import Any

# `make test-deploy` makes an environment with vLLM and names its interpreter.
PYTHON = os.environ.get("TESTS_VLLM_PYTHON")
# Its attention on the CPU has no heads of fewer dimensions.
SIZES: dict[str, Any] = {"hidden_size": 128, "head_dim": 32}
