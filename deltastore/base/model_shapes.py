"""Names and shapes of a model's tensors, from its configuration alone. Reads and allocates no weights."""

from __future__ import annotations

from pathlib import Path

from deltastore.errors import CheckpointError


def model_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return the tensors of the model that a directory's `config.json` describes, as `save_pretrained` names them.

    Experts are listed one by one where checkpoints store them so, although transformers fuses them in memory. A tied
    head is not listed twice.

    Raises:
        CheckpointError: There is no configuration, or transformers builds no language model from it.
    """
    if not (directory / "config.json").is_file():
        raise CheckpointError(
            f"{directory}: no config.json there: give the directory of a model's configuration"
        )
    # Deferred: torch and transformers take seconds to import.
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError, ArithmeticError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{directory}: transformers builds no language model from it: {reason}"
        ) from error
    stored = revert_weight_conversion(model, dict(model.named_parameters()))
    return {name: tuple(tensor.shape) for name, tensor in stored.items()}
