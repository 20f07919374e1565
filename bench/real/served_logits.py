"""Compute a variant's and the base's logits of one text with the delta-aware model, as a step of the engine does."""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

import torch
from torch import Tensor

from bench.real.models import TEXT_TOKENS
from deltastore.checkpoint import Checkpoint
from deltastore.format.artifact import Artifact
from server.deltas.resident import DeltaTables, ResidentDelta, Slot
from server.engine.model_runner import ModelRunner, ScheduledSequence
from server.engine.sequence import Sequence
from server.model.loader import ServedModel, load_model
from server.protocol.request import Request, SamplingParams, token_ids_of


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("base", type=Path)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--variant-out", type=Path, required=True)
    parser.add_argument("--base-out", type=Path, required=True)
    args = parser.parse_args()
    cpu = torch.device("cpu")
    served = load_model(Checkpoint.open(args.base), cpu, getattr(torch, args.dtype), threading.Event())
    num_pages = -(-TEXT_TOKENS // served.attention.page_tokens)
    served.attention.allocate(1 + num_pages)
    served.context.allocate(1, TEXT_TOKENS, cpu)
    torch.save(_logits(served, None, num_pages), args.base_out)
    delta = _resident(args.artifact, served.context.tables)
    torch.save(_logits(served, delta, num_pages), args.variant_out)


def _resident(path: Path, tables: DeltaTables) -> ResidentDelta:
    with Artifact.open(path) as artifact:
        memory = torch.empty(artifact.manifest.device_bytes, dtype=torch.uint8)
        with path.open("rb") as file:
            file.seek(artifact.header.data_start)
            file.readinto(memory.numpy().data)
        return tables.adopt(tables.layout(artifact.header, artifact.manifest, ""), Slot(0, memory))


def _logits(served: ServedModel, delta: ResidentDelta | None, num_pages: int) -> Tensor:
    ids = token_ids_of(7 * token for token in range(1, 1 + TEXT_TOKENS))
    # With prompt log-probabilities the logits of every token are computed.
    request = Request("bench", "default", None, None, ids, 1 + max(ids), SamplingParams(prompt_logprobs=0))
    sequence = Sequence(request, 0)
    sequence.page_table.pages = list(range(1, 1 + num_pages))
    batch = [ScheduledSequence(sequence, len(ids), delta)]
    return ModelRunner(served).forward(batch, sequence.page_table.pages)


if __name__ == "__main__":
    main()
