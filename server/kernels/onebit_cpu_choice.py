"""The way to compute each one-bit product on this processor, from its shape. Measured once per machine.

Lookup and expansion are both linear in outputs, so their ratio depends on inputs and rows alone. A measurement may end
otherwise on a busy machine; so it only chooses in bfloat16, where the other rows of a batch change roundings, too.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import llvmlite.binding as llvm
import torch
from torch import Tensor

from deltastore.compiled import numba_cache
from deltastore.user_cache import CacheDirectory, user_cache_dir
from server.kernels import onebit_cpu_expand as expand
from server.kernels.sources import SOURCES

log = logging.getLogger(__name__)

# Rows of a group that are measured.
ROWS = (16, 64, 256)
# More rows than any group has.
NEVER = 1 << 62
# Outputs of the matrices that are measured, and how often; the fastest time counts.
NUM_OUTPUTS = 1024
NUM_TURNS = 3
# Expansion replaces lookup, which rounds once, if its time is below this share of lookup's.
MAX_SHARE = 0.95

# Adds the product of one group, which has all rows: ``(output, x, plane_ptrs, ranges)``.
Product = Callable[[Tensor, Tensor, Tensor, Tensor], None]


@dataclass(frozen=True, slots=True)
class Choice:
    """How products are computed."""

    by_lookup: bool  # else by selection
    # By inputs: the rows from which a bfloat16 group is expanded to bfloat16; inputs that are missing never are.
    half_rows: Mapping[int, int] = field(default_factory=dict)

    def expansion(self, x: Tensor, output: Tensor) -> tuple[int, torch.dtype]:
        """Return the rows from which a group's signs are expanded, and the dtype of its product."""
        if not self.by_lookup:
            return expand.MIN_ROWS, torch.float32
        if x.dtype == output.dtype == torch.bfloat16:
            return self.half_rows.get(x.shape[1], NEVER), torch.bfloat16
        return NEVER, torch.float32


def half_rows(in_features: Collection[int], by_lookup: Product) -> dict[int, int]:
    """Return `Choice.half_rows`, from the user's cache or measured, which takes milliseconds for each of the inputs."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return {}
    directory, name = CacheDirectory(user_cache_dir() / "choices"), _entry()
    known = _parsed(directory.read(name))
    if missing := sorted(set(in_features) - known.keys()):
        known |= {width: _measured(width, by_lookup) for width in missing}
        try:
            directory.write(name, json.dumps(known).encode())
        except OSError as error:
            log.info("the choice of kernels is not kept (%s): the next start measures again", error)
    return {width: known[width] for width in in_features}


def _entry() -> str:
    """Return the file name for this processor, these versions and this number of threads."""
    parts = (
        *(SOURCES.digest, numba_cache.VERSIONS, torch.__version__, torch.get_num_threads()),
        *(llvm.get_host_cpu_name(), sorted(llvm.get_host_cpu_features().items())),
    )
    return f"onebit-{hashlib.sha256(repr(parts).encode()).hexdigest()}"


def _parsed(content: bytes | None) -> dict[int, int]:
    """Return what the file holds; nothing if it does not exist or is damaged."""
    try:
        return {int(width): int(rows) for width, rows in json.loads(content or b"{}").items()}
    except (ValueError, TypeError, AttributeError):
        return {}


@torch.inference_mode()
def _measured(in_features: int, by_lookup: Product) -> int:
    """Return the rows from which expansion is faster, at that number and all larger ones that are measured."""
    generator = torch.Generator().manual_seed(0)
    packed = (NUM_OUTPUTS, (in_features + 7) // 8)
    signs = torch.randint(0, 256, packed, dtype=torch.uint8, generator=generator)
    factor_out, factor_in = torch.ones(NUM_OUTPUTS), torch.ones(in_features)
    plane_ptrs = torch.tensor([[part.data_ptr() for part in (signs, factor_out, factor_in)]])
    found = NEVER
    for rows in reversed(ROWS):
        x = torch.zeros(rows, in_features, dtype=torch.bfloat16)
        output = torch.zeros(rows, NUM_OUTPUTS, dtype=torch.bfloat16)
        ranges = torch.tensor([[0, rows]], dtype=torch.int32)

        def expanded() -> None:
            expand.add_product(output, x, (signs, factor_out, factor_in), torch.bfloat16)  # noqa: B023 - called here

        def looked_up() -> None:
            by_lookup(output, x, plane_ptrs, ranges)  # noqa: B023 - called here

        # In turns, so that other work on the machine slows both.
        turns = [(_seconds(expanded), _seconds(looked_up)) for _ in range(NUM_TURNS)]
        expanded_s, looked_up_s = (min(times) for times in zip(*turns, strict=True))
        if expanded_s >= MAX_SHARE * looked_up_s:
            break
        found = rows
    return found


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
