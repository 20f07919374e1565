"""The interpreter that runs engines with vLLM, and sizes of models that vLLM runs on the CPU."""

from __future__ import annotations

import os
from typing import Any

import pytest

# `make test-deploy` makes an environment with vLLM and names its interpreter.
PYTHON = os.environ.get("TESTS_VLLM_PYTHON")
NEEDS_VLLM = [
    pytest.mark.deploy,
    pytest.mark.skipif(PYTHON is None, reason="TESTS_VLLM_PYTHON names no interpreter that has vLLM"),
]
# Its attention on the CPU has no heads of fewer dimensions.
SIZES: dict[str, Any] = {"hidden_size": 128, "head_dim": 32}
