"""Compile all CPU kernels, or load them, then compute products. Print how many passes numba's compiler ran for each.

A program of its own: a process has compiled its kernels or it has not.
"""

from __future__ import annotations

import torch
from numba.core.event import install_recorder

from server.kernels import add_planes, add_rows, compile_kernels
from tests.server.helpers.grouped import operands


def main() -> None:
    with install_recorder("numba:run_pass") as start:
        compile_kernels()
    with install_recorder("numba:run_pass") as later:
        for num_rows in (1, 40):
            operands(64, 32, [(0, num_rows)]).after(add_planes)
        given = operands(64, 32, [(0, 1)])
        ids = torch.zeros(len(given.x), dtype=torch.int64)
        add_rows(given.x, ids, given.table, given.order, given.ranges, 32, 1.0)
    print(len(start.buffer), len(later.buffer))


if __name__ == "__main__":
    main()
