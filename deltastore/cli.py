"""The commands `peraxis inspect` and `peraxis verify`: print an artifact's contents, and check it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltastore.console import size_text
from deltastore.errors import ArtifactError, BaseMismatch, CheckpointError, UsageError, failures_as, shown

# For types alone, because importing torch takes seconds and `--help` needs none of it.
if TYPE_CHECKING:
    from deltastore.base import Base
    from deltastore.format.artifact import Artifact
    from deltastore.format.sizes import OneBitPlan

app = typer.Typer(no_args_is_help=True)

# Fields of a tensor's spec that are printed if they are set.
NOTED = ("planes", "rank", "added_rows", "against", "num_zeros", "transposed")

Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")]


@app.command()
def inspect(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="The artifact.")] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan", metavar="CONFIG_DIR", help="Instead of a FILE: plan the bytes of a delta of this model."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the contents of a delta, or plan its size from a model's configuration.

    Examples: peraxis inspect tuned.safetensors; peraxis inspect --plan DIR_OF_CONFIG_JSON
    """
    if (file is None) == (plan is None):
        raise UsageError("give the FILE of an artifact, or --plan and the directory of a config.json")
    # Deferred, because importing torch takes seconds and `--help` needs none of it.
    from deltastore.format.artifact import Artifact
    from deltastore.format.sizes import one_bit_plan

    if plan is not None:
        shapes, stacks = planned_tensors(plan)
        plans = {
            kind: one_bit_plan(shapes, stacks, embeddings=kind == "compress")
            for kind in ("compress", "whole")
        }
        print(json.dumps(_plans_json(plans), indent=2) if as_json else _plans_text(plans))
    if file is not None:
        with Artifact.open(file) as artifact:
            facts = _facts(artifact)
        print(json.dumps(facts, indent=2) if as_json else _text(facts))


@app.command()
def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The artifact.")],
    base: Annotated[
        Path | None, typer.Option("--base", metavar="DIR", help="The base that it must fit.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a delta, and with --base its fit to a base; exit with 1 if something is wrong.

    Example: peraxis verify tuned.safetensors --base BASE
    """
    # Deferred, because importing torch takes seconds and `--help` needs none of it.
    from deltastore.checkpoint import Checkpoint
    from deltastore.console import identify_base

    identity = None if base is None else identify_base(Checkpoint.open(base), enabled=True)
    finding, digest = _finding(file, identity)
    if as_json:
        findings = [] if finding is None else [finding]
        print(json.dumps({"file": str(file), "digest": digest, "findings": findings}, indent=2))
    else:
        fits = "" if identity is None else f", and it fits {identity.id}"
        print(f"FOUND: {finding}" if finding else f"{file}: sound{fits}; {digest}")
    if finding:
        raise typer.Exit(1)


def planned_tensors(directory: Path) -> tuple[dict[str, tuple[int, ...]], frozenset[str]]:
    """Return shapes and stacks of experts of the model that a directory's `config.json` describes.

    Names are those of `save_pretrained`.
    Experts are listed one by one where checkpoints store them so, although transformers fuses them in memory. A tied
    head is not listed twice.

    Raises:
        CheckpointError: There is no configuration, or transformers builds no language model from it.
    """
    if not (directory / "config.json").is_file():
        raise CheckpointError(
            f"{directory}: no config.json there: give the directory of a model's configuration"
        )
    # Deferred, because it takes seconds and only --plan needs it.
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    from deltastore.experts import expert_stacks, is_stack
    from deltastore.wrappers import text_config

    with failures_as(
        lambda reason: CheckpointError(
            f"{directory}: transformers builds no language model from it: {reason}"
        )
    ):
        config = text_config(AutoConfig.from_pretrained(directory, trust_remote_code=False))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    parameters = dict(model.named_parameters())
    stored = revert_weight_conversion(model, parameters)
    stacks = revert_weight_conversion(model, {name: parameters[name] for name in expert_stacks(model)})
    names = frozenset(name for name in stacks if name in stored and is_stack(tuple(stored[name].shape)))
    return {name: tuple(tensor.shape) for name, tensor in stored.items()}, names


def _finding(file: Path, base: Base | None) -> tuple[str | None, str | None]:
    """Return the first defect, and the digest if the file could be opened."""
    from deltastore.format.artifact import Artifact
    from deltastore.format.validate import check_artifact, check_base

    digest = None
    try:
        with Artifact.open(file) as artifact:
            digest = f"sha256:{artifact.digest()}"
            check_artifact(artifact)
            if base is not None:
                check_base(artifact, base)
    except (ArtifactError, BaseMismatch) as error:
        return str(error), digest
    return None, digest


def _facts(artifact: Artifact) -> dict[str, Any]:
    manifest, bytes_of = artifact.manifest, _bytes_by_kind(artifact)
    return {
        "file": str(artifact.path),
        "digest": f"sha256:{artifact.digest()}",
        "format": int(manifest.format),
        "base_id": manifest.base_id,
        "base_fingerprint": manifest.base_fingerprint,
        "method": manifest.method,
        "tied": manifest.tied,
        "size_bytes": artifact.size_bytes,
        "device_bytes": manifest.device_bytes,
        "bytes": bytes_of,
        "files": manifest.files,
        "compressor": manifest.compressor,
        "fidelity": manifest.fidelity,
        "config": manifest.config,
        "tensors": {name: spec.model_dump(exclude_defaults=True) for name, spec in manifest.tensors.items()},
    }


def _bytes_by_kind(artifact: Artifact) -> dict[str, int]:
    """Sum the artifact's bytes by kind of part."""
    from deltastore.format.sizes import KINDS, files_bytes, tensor_bytes

    tensors = [tensor_bytes(artifact, name) for name in artifact.manifest.tensors]
    sizes = {kind: sum(own.get(kind, 0) for own in tensors) for kind in KINDS}
    return sizes | {"files": files_bytes(artifact)}


def _text(facts: dict[str, Any]) -> str:
    kinds = ", ".join(
        f"{kind.replace('_', ' ')} {size_text(size)}" for kind, size in facts["bytes"].items() if size
    )
    lines = [
        f"{facts['file']}  {facts['digest']}",
        f"base {shown(facts['base_id'])}, fingerprint {facts['base_fingerprint'][:12]}; method {facts['method']}"
        f"{'; output head tied to the embedding' if facts['tied'] else ''}",
        f"{size_text(facts['size_bytes'])}, of them {size_text(facts['device_bytes'])} on the device: {kinds}",
        f"files: {', '.join(facts['files']) or 'none'}",
        *_section("compressor", facts["compressor"]),
        *_section("fidelity", facts["fidelity"]),
    ]
    for name, spec in facts["tensors"].items():
        shape = "x".join(map(str, spec["shape"]))
        error = f"error {spec['error']:.4f}" if "error" in spec else ""
        notes = [key if spec[key] is True else f"{key} {spec[key]}" for key in NOTED if key in spec]
        lines.append(
            f"  {name:<56} {shape:>14}  {spec.get('axis', 'whole'):<6} {' '.join([error, *notes])}".rstrip()
        )
    return "\n".join(lines)


def _section(title: str, facts: dict[str, Any]) -> Iterator[str]:
    """Yield free-form facts, one group to a line. Strings in them are untrusted, so `shown` quotes them."""
    groups = [(key, value) for key, value in facts.items() if isinstance(value, dict)]
    plain = {key: value for key, value in facts.items() if not isinstance(value, dict)}
    if plain or not groups:
        said = ", ".join(f"{_words(key)} {_value(value)}" for key, value in plain.items())
        yield f"{title}: {said or 'nothing'}"
    for key, value in groups:
        yield from _section(f"{title}, {_words(key)}", value)


def _words(key: str) -> str:
    return shown(key)[1:-1].replace("_", " ")


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return shown(value)[1:-1] if isinstance(value, str) else "auto" if value is None else shown(value)


def _plans_json(plans: dict[str, OneBitPlan]) -> dict[str, Any]:
    return {"embeddings": {kind: {**asdict(plan), "ratio": plan.ratio} for kind, plan in plans.items()}}


def _plans_text(plans: dict[str, OneBitPlan]) -> str:
    lines = [
        f"--embeddings {kind:<8}  {size_text(plan.device_bytes):>11}  {plan.ratio:5.2f} times smaller than 16 bits  "
        f"(signs {size_text(plan.signs_bytes)}, scales {size_text(plan.scales_bytes)}, "
        f"whole {size_text(plan.whole_bytes)})"
        for kind, plan in plans.items()
    ]
    return "\n".join([f"full at 16 bits: {size_text(plans['compress'].full_bytes)}", *lines])
