"""Compress a fine-tune in Python, measure the delta, and write it back as a stock checkpoint.

Run it as: python examples/compress.py BASE FINETUNE DIRECTORY [SAMPLES]
"""

import sys
from pathlib import Path

import peraxis


def main(base: str, finetune: str, directory: str, samples: str = "256") -> None:
    """Make two artifacts in a directory: one of the weights alone, and one that is fitted to text."""
    out = Path(directory)
    coded = peraxis.compress(base, finetune, out / "weights.safetensors", calibration="none")
    print(f"weights alone: {coded}")

    fitted = peraxis.compress(base, finetune, out / "fitted.safetensors", samples=int(samples))
    print(f"fitted: {fitted}")

    # On text of another seed.
    for made in (coded, fitted):
        measured = peraxis.evaluate(base, finetune, made, "self", samples=8)
        print(f"{made.path.name}: KL {measured.delta.kl:.3g}, the base's {measured.base.kl:.3g}")

    print(f"made from base {fitted.manifest.base_id}, {len(fitted.manifest.tensors)} tensors")
    print(f"merged: {peraxis.merge(base, fitted, out / 'merged')}")


if __name__ == "__main__":
    main(*sys.argv[1:])
