"""Every option of `compress`, once: its type, its default, its help, and the option without which it has no effect.

`cli.py` makes the command from these fields. Needs neither torch nor files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_type_hints

from deltastore.errors import UsageError

if TYPE_CHECKING:
    import torch

# `both`: a scale per row and one per column, together. The paper's choice of the better axis is `per-axis`.
Method = Literal["scalar", "per-axis", "both"]
RecipeName = Literal["ours", "paper"]
RivalName = Literal["lora"]
METHODS: Mapping[RecipeName, Method] = {"ours": "both", "paper": "per-axis"}  # where none is given
LARGEST_BUDGET = 16.0  # with which a delta is as large as the model at 16 bits
LARGEST_SEED = 2**63 - 1
# Panels of the command's help.
TEXT, PAPER = "Fitting to text", "The paper's recipe"


@dataclass(frozen=True, slots=True)
class Option:
    """How the command shows a field. A field without one has no flag."""

    help: str
    panel: str | None = None
    metavar: str | None = None
    flag: str | None = None  # where it is not the field's name
    needs: Literal["text"] | RecipeName | None = None  # the only recipe that reads it, or `text` to fit to


@dataclass(frozen=True, slots=True)
class Calibration:
    """Source and amount of calibration text.

    Raises:
        UsageError: a value out of its range.
    """

    text: Annotated[
        str,
        Option(
            "Text to fit to: sampled from the fine-tune itself, a file of text or records (.txt, .jsonl, .json, .csv, "
            ".parquet), or a data set of the hub (NAME or NAME:CONFIG); 'none' codes the weights alone.",
            TEXT,
            "self|none|FILE|DATASET",
            "--calibration",
        ),
    ] = "self"
    samples: Annotated[int, Option("Number of sequences of calibration text; a tenth is held out.", TEXT)] = (
        256
    )
    length: int = 192  # tokens per sequence
    seed: Annotated[int, Option("Seed for sampling calibration text.", TEXT)] = 0

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UsageError(f"`samples` {self.samples}: give at least 1, or `text='none'`")
        if not 0 <= self.seed <= LARGEST_SEED:
            raise UsageError(f"`seed` {self.seed}: give 0 to {LARGEST_SEED}")
        if self.length < 2:
            raise UsageError(f"a calibration length of {self.length} tokens: give at least 2")


@dataclass(frozen=True, slots=True)
class FitSettings:
    """Settings of fitting to text.

    Raises:
        UsageError: a value out of its range, or one that the recipe does not read.
    """

    calibration: Calibration = Calibration()
    recipe: Annotated[
        RecipeName,
        Option(
            "Ours: signs and scales by least squares, then KL distillation. The paper's: one vector per matrix by "
            "AdamW, for five epochs in layers and five end to end; BitDelta with --method scalar.",
            TEXT,
        ),
    ] = "ours"
    refine_signs: Annotated[
        bool, Option("Choose signs by what they do to a layer's output.", TEXT, needs="ours")
    ] = True
    distill_epochs: Annotated[
        int | None,
        Option(
            "Passes over the text that train the delta end to end; 0 trains nothing. By default 3; with the paper's "
            "recipe 5, or 1 for scalar.",
            TEXT,
        ),
    ] = None
    learn_signs: Annotated[
        bool,
        Option("Let signs move end to end, at two bytes of host memory each.", TEXT, needs="ours"),
    ] = True
    budget: Annotated[
        float,
        Option(
            "Size as a multiple of one bit per weight; 1.10 adds 10%, spent where it gains most.",
            needs="ours",
        ),
    ] = 1.0
    device: Annotated[Literal["auto", "cpu", "cuda"], Option("Device to fit on.")] = "auto"
    rate: Annotated[float, Option("Learning rate of AdamW.", PAPER, needs="paper")] = 1e-4
    cosine: Annotated[
        bool, Option("Lower the rate along a cosine in the stage that fits layers.", PAPER, needs="paper")
    ] = False
    # By the layer's output in the paper's text, by the whole model's in its Algorithm 6.
    axis_loss: Annotated[
        Literal["layer", "end"],
        Option(
            "Loss that chooses the axis of a matrix: that of its layer's output, or of the whole model's.",
            PAPER,
            needs="paper",
        ),
    ] = "layer"
    with_scalar: Annotated[bool, Option("Try a single scale for each matrix, too.", PAPER, needs="paper")] = (
        False
    )

    def __post_init__(self) -> None:
        if not 1 <= self.budget <= LARGEST_BUDGET:
            raise UsageError(
                f"`budget` {self.budget}: it is over one bit per weight: give at least 1, and at most "
                f"{LARGEST_BUDGET:g}, with which the fine-tune itself is as small"
            )
        if not 0 < self.rate < math.inf:
            raise UsageError(f"`rate` {self.rate}: give a number above 0")
        if (self.distill_epochs or 0) < 0:
            raise UsageError(f"`distill_epochs` {self.distill_epochs}: give 0 or more")
        for name, needs in _given(
            FitSettings, {name: getattr(self, name) for name in options_of(FitSettings)}
        ):
            if needs not in (None, self.recipe):
                raise UsageError(
                    f"{name} does nothing with `recipe={self.recipe!r}`: give `recipe={needs!r}` with it"
                )

    def torch_device(self) -> torch.device:
        """Return the device where models run.

        Raises:
            UsageError: a device that this machine lacks.
        """
        # Deferred, because importing torch takes seconds and no other part of this file needs it.
        import torch

        if self.device == "cuda" and not torch.cuda.is_available():
            raise UsageError("`device` cuda: this machine has none that torch can use: give `device='cpu'`")
        return torch.device("cuda" if self.device != "cpu" and torch.cuda.is_available() else "cpu")


@dataclass(frozen=True, slots=True)
class CompressConfig:
    """Settings of one run.

    Raises:
        UsageError: a value out of its range, or one that needs text to fit to where there is none.
    """

    base: Annotated[
        str, Option("The base: a directory or a hub id, as ORG/NAME or ORG/NAME@REV.", metavar="DIR|HF_ID")
    ]
    finetune: Annotated[
        str,
        Option(
            "The fine-tune: a directory or a hub id, as of the base; of a checkpoint or a LoRA adapter.",
            metavar="DIR|HF_ID",
        ),
    ]
    out: Annotated[Path, Option("The artifact to write.", metavar="FILE.safetensors")]
    method: Annotated[
        Method | None,
        Option(
            "Scales of each matrix: a single one; one per row or column; or one per row and one per column. By default "
            "both; with the paper's recipe per-axis."
        ),
    ] = None
    any_base: Annotated[
        bool,
        Option(
            "Go on with a base that the fine-tune seems not to be tuned from, or where the two seem to be swapped."
        ),
    ] = False
    embeddings: Annotated[
        Literal["compress", "whole"],
        Option("Code embedding and output head at one bit, or store them as they are."),
    ] = "compress"
    progress: bool = False
    fit_settings: FitSettings | None = None  # None codes the weights alone
    min_agreement: Annotated[
        float | None,
        Option(
            "Fail, and write nothing, if fewer held-out tokens than this share (0 to 1) come out the same.",
            needs="text",
        ),
    ] = None
    resume: Annotated[
        bool, Option("Go on where an interrupted run for the same --out ended.", needs="text")
    ] = False
    report: Annotated[
        Path | None,
        Option("Write a model card (README.md) there.", metavar="DIR"),
    ] = None
    rival: Annotated[
        RivalName | None,
        Option(
            "Measure a LoRA with as many bytes on the held-out text, too, for result and model card. This takes "
            "an SVD of each matrix and two passes over that text, and leaves the artifact as it is.",
            needs="text",
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.min_agreement is not None and not 0 <= self.min_agreement <= 1:
            raise UsageError(f"`min_agreement` {self.min_agreement}: give a share from 0 to 1")
        check_rival(self.rival)
        if self.fit_settings is None:
            own = {name: getattr(self, name) for name in options_of(CompressConfig)}
            _refuse(name for name, needs in _given(CompressConfig, own) if needs == "text")

    @property
    def scales(self) -> Method:
        """The method, which is the recipe's own where none is given."""
        return self.method or METHODS["ours" if self.fit_settings is None else self.fit_settings.recipe]


def check_rival(rival: str | None) -> None:
    """Raise UsageError for a rival that there is none of."""
    if rival not in (None, *get_args(RivalName)):
        raise UsageError(f"`rival` {rival!r}: give 'lora'")


@dataclass(frozen=True, slots=True)
class OptionField:
    """A field with an option: its type, its default (MISSING without one), and how the command shows it."""

    kind: Any
    default: Any
    option: Option


@cache
def options_of(settings: type) -> Mapping[str, OptionField]:
    """Return the options of one of the classes above by name, in their order."""
    hints = get_type_hints(settings, include_extras=True)
    found = {}
    for field in fields(settings):
        kind, *extras = get_args(hints[field.name]) or (None,)
        if extras and isinstance(extras[-1], Option):
            found[field.name] = OptionField(kind, field.default, extras[-1])
    return found


def config_of(**options: Any) -> CompressConfig:
    """Return the settings of one run from the options of all three classes by name.

    Raises:
        TypeError: a name that no class has, or a checkpoint that is missing.
        UsageError: a value out of its range, or one that would do nothing.
    """
    text = {name: options.pop(name) for name in options_of(Calibration) if name in options}
    fit = {name: options.pop(name) for name in options_of(FitSettings) if name in options}
    if text.get("text") != "none":
        return CompressConfig(**options, fit_settings=FitSettings(Calibration(**text), **fit))
    # Weights alone are coded on the CPU, whichever device is asked for.
    del text["text"]
    fit.pop("device", None)
    _refuse(name for name, _ in (*_given(Calibration, text), *_given(FitSettings, fit)))
    return CompressConfig(**options)


def _given(settings: type, values: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    """Yield each option whose value is not its default, as errors name it, and the option's `needs`."""
    for name, field in options_of(settings).items():
        if name in values and values[name] != field.default:
            yield f"`{name}=False`" if values[name] is False else f"`{name}`", field.option.needs


def _refuse(without_text: Iterator[str]) -> None:
    for name in without_text:
        raise UsageError(f"{name} does nothing without calibration text: give `text='self'` or a file")
