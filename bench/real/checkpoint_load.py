"""Load a checkpoint with safetensors into memory of its own, shard by shard, and print the time."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor


def main(directory: Path) -> None:
    start, mapped_s, owned = time.perf_counter(), 0.0, dict[str, Tensor]()
    for shard in sorted(directory.glob("*.safetensors")):
        begun = time.perf_counter()
        # On a CPU safetensors maps the file, and the first touch reads it.
        tensors = load_file(shard)
        mapped_s += time.perf_counter() - begun
        owned |= {name: tensor.clone() for name, tensor in tensors.items()}
    total_s = time.perf_counter() - start
    num_bytes = sum(tensor.nbytes for tensor in owned.values())
    print(
        json.dumps(
            {"load_file_s": mapped_s, "clone_s": total_s - mapped_s, "total_s": total_s, "bytes": num_bytes}
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
