"""Lets Triton's kernels run without a GPU. Triton looks once, when it is imported, so conftest imports this first."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
