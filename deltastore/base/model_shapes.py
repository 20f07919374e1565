"""Names and shapes of a model's tensors from its configuration alone: no weights, no memory."""

from __future__ import annotations

from pathlib import Path

from deltastore.errors import CheckpointError


def model_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """The tensors, as `save_pretrained` names them, of the model that a directory's config.json describes.

    Experts are one by one where checkpoints have them so, whatever the library does in memory; a tied head is not named
    twice.

    Raises:
        CheckpointError: no configuration there, or none that the library builds a language model from.
    """
    if not (directory / "config.json").is_file():
        raise CheckpointError(
            f"{directory}: no config.json there: give the directory of a model's configuration"
        )
    import torch  # imported when needed, as is transformers: they take seconds
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError, ArithmeticError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{directory}: the library builds no model from it: {reason}") from error
    stored = revert_weight_conversion(model, dict(model.named_parameters()))
    return {name: tuple(tensor.shape) for name, tensor in stored.items()}
