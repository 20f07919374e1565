"""Run the GPU bench on a CPU as if numba were not installed, as on a machine that has the wheels of `make wheels`.

A program of its own. Kernels are replaced by their reference in torch, because those for a CPU are compiled by numba.
"""

from __future__ import annotations

import sys

ABSENT = ("numba", "llvmlite")

if __name__ == "__main__":
    # An entry of None makes Python refuse the import.
    sys.modules.update(dict.fromkeys(ABSENT))  # type: ignore[arg-type]
    from server import kernels
    from server.kernels import reference as onebit_reference
    from server.model import attention

    sys.modules["server.kernels.onebit_cpu"] = onebit_reference
    # `prepare` would compile kernels for the CPU.
    setattr(kernels, "prepare", lambda *_: None)  # noqa: B010
    setattr(attention, "_single_token_kernel", lambda device_type: None)  # noqa: B010
    from bench.gpu import main

    sys.exit(main(sys.argv[1:]))
