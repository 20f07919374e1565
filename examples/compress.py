"""Compress a fine-tune in Python, measure the delta, and write it back as a stock checkpoint.

Run it as: python examples/compress.py BASE FINETUNE DIRECTORY [SAMPLES]
"""

import sys
from pathlib import Path

import compressor
import deltastore


def main(base: str, finetune: str, directory: str, samples: str = "256") -> None:
    """Make two artifacts in a directory: one of the weights alone, and one that is fitted to text."""
    out = Path(directory)
    coded = compressor.compress(base, finetune, out / "weights.safetensors", text="none")
    print(f"weights alone: {coded.artifact_bytes} bytes in {coded.seconds:.1f} s")

    fitted = compressor.compress(base, finetune, out / "fitted.safetensors", samples=int(samples))
    print(
        f"fitted: KL {fitted.kl:.3g} on held-out text, {fitted.artifact_bytes} bytes in {fitted.seconds:.1f} s"
    )

    # On text of another seed.
    for made in (coded, fitted):
        measured = compressor.evaluate(base, finetune, made.out, text="self", samples=8)
        print(f"{made.out.name}: KL {measured.delta.kl:.3g}, the base's {measured.base.kl:.3g}")

    with deltastore.Artifact.open(fitted.out) as artifact:
        print(f"made from base {artifact.manifest.base_id}, {len(artifact.manifest.tensors)} tensors")
    print(f"merged: {compressor.merge(base, fitted.out, out / 'merged').out}")


if __name__ == "__main__":
    main(*sys.argv[1:])
