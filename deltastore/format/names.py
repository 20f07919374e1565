"""The names of tensors in an artifact's file that are not a fine-tune's own: its files and its padding."""

from __future__ import annotations


def file_tensor(filename: str) -> str:
    """Return the name of the tensor that holds one of the variant's files."""
    return f"file.{filename}"


def padding_tensor(index: int) -> str:
    """Return the name of the tensor that pads up to the next aligned one; safetensors allows no holes."""
    return f"padding.{index}"
