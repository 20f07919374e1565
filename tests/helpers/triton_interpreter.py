"""Run Triton's kernels in its interpreter if there is no GPU. Triton reads the setting once, when it is imported."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
