"""The command `peraxis demo`: parse options, run the stages in order, print what comes of them."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from deltastore.errors import UsageError

OWN_PAIR = "Your own pair"

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class Progress:
    """Prints lines on stderr with the seconds since the demo began, in the processes that it starts, too."""

    began: float  # by time.monotonic, which all processes of a machine share

    def __call__(self, line: str) -> None:
        print(f"{time.monotonic() - self.began:4.0f} s  {line}", file=sys.stderr, flush=True)


@app.command()
def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave the server running until Ctrl-C.")] = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Take models too small to learn, to see in a minute that everything runs."
        ),
    ] = False,
    work: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory of the trained models, by default in the user's cache; with --base the directory that "
            "keeps the delta, by default ./peraxis-demo.",
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="DIR|HF_ID",
            help="Use your own base, a directory or a hub id, and train nothing; needs --finetune.",
            rich_help_panel=OWN_PAIR,
        ),
    ] = None,
    finetune: Annotated[
        str | None,
        typer.Option(
            "--finetune",
            metavar="DIR|HF_ID",
            help="Compress this fine-tune of --base: a directory or a hub id, of a checkpoint or a LoRA adapter.",
            rich_help_panel=OWN_PAIR,
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt",
            metavar="TEXT",
            help="Ask this instead of three built-in prompts; repeatable.",
            rich_help_panel=OWN_PAIR,
        ),
    ] = None,
) -> None:
    """Train a small base and three fine-tunes, compress, serve and ask them, and print what comes of it.

    Training takes half of the time. Its models are kept, and a second demo finds them.

    With --base and --finetune, compress, serve and ask a pair of your own:
    peraxis demo --base ./base --finetune ./my-finetune
    """
    _check_pair_options(base, finetune, prompt, quick)
    progress = Progress(time.monotonic())
    progress("importing torch and transformers")
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if base is not None and finetune is not None:
        from peraxis.demo.own_pair import OwnPair, try_pair

        try_pair(OwnPair(base, finetune, prompt or (), work or Path("peraxis-demo"), keep), progress)
        return
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    _train_and_serve(work or cache / "peraxis" / "demo", quick, keep, progress)


def _train_and_serve(models_dir: Path, quick: bool, keep: bool, progress: Progress) -> None:
    from peraxis.demo import service, stages

    scope = stages.QUICK if quick else stages.FULL
    models, scores = stages.train_all(scope, models_dir, progress, _tell)
    with tempfile.TemporaryDirectory(prefix="peraxis-demo-") as scratch:
        made, registry = Path(scratch), Path(scratch) / "registry"
        deltas = stages.compress_all(scope, models, made, progress, _tell)
        with service.running(models.base, registry, made / "server.log", progress) as client:
            stages.publish_all(client, deltas, progress, _tell)
            stages.ask_in_one_batch(client, models, _tell)
            served = stages.score_all(client, scope, deltas, progress, _tell)
            stages.roll_back(client, deltas, _tell)
            delta, checkpoint = stages.first_tokens(client, models, deltas, registry, progress)
            _tell(f"\n{stages.score_table(scores, served, deltas)}")
            _tell(f"\n{stages.first_token_table(delta, checkpoint)}")
            _tell(f"\nAll of it took {time.monotonic() - progress.began:.0f} s.")
            if keep:
                _tell(f"\nThe server is at {client.url}. Try:\n")
                _tell("\n".join(stages.curl_lines(client.url, models)))
                progress("running until Ctrl-C")
                signal.pause()
            else:
                _tell("`peraxis demo --keep` leaves the server running, and prints requests to try.")


def _tell(text: str) -> None:
    print(text, flush=True)


def _check_pair_options(
    base: str | None, finetune: str | None, prompts: list[str] | None, quick: bool
) -> None:
    if (base is None) != (finetune is None):
        raise UsageError(
            "--base and --finetune go together: give both, or neither to train the demo's own models"
        )
    if prompts and base is None:
        raise UsageError("--prompt is for a pair of your own: give --base and --finetune with it")
    if quick and base is not None:
        raise UsageError("--quick is for the demo's own models: leave it out with --base and --finetune")
    if not all(text.strip() for text in prompts or ()):
        raise UsageError("--prompt is empty: give it a text, or leave it out")
