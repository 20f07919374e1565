"""The stacks of experts of a model: parameters ``[experts, out, in]`` that transformers' modules of experts own."""

from __future__ import annotations

from typing import Any

from deltastore.format.manifest import MAX_EXPERTS

# Modules of experts that store matrices as ``[in, out]`` and do not say so by an attribute, as others do.
TRANSPOSED = ("Llama4TextExperts",)


def expert_stacks(model: Any) -> dict[str, bool]:
    """Return the names of a model's stacks of experts, and if they are transposed: ``[experts, in, out]``.

    Args:
        model: of transformers; its parameters may be on the meta device.
    """
    return {
        f"{path}.{name}": bool(getattr(module, "is_transposed", type(module).__name__ in TRANSPOSED))
        for path, module in model.named_modules()
        if type(module).__name__.endswith("Experts")
        for name, parameter in module.named_parameters(recurse=False)
        if is_stack(tuple(parameter.shape))
    }


def is_stack(shape: tuple[int, ...]) -> bool:
    """True if a tensor may be a stack of experts by its shape."""
    return len(shape) == 3 and 0 < shape[0] <= MAX_EXPERTS and min(shape[1:]) > 1
