"""Publish a fine-tune from a pipeline: compress it, refuse a delta that is not near enough, try it, then promote it.

Run it as: python examples/publish.py BASE FINETUNE NAME SERVER [AGREEMENT [SAMPLES]]

The key of the tenant is in PERAXIS_API_KEY. The exit status is not 0 if a step fails, and the variant then keeps the
version that it had.
"""

import sys
import tempfile
from pathlib import Path

import peraxis
from deltastore.errors import PeraxisError

QUESTIONS = ("Hello", "What can you do?")


def main(
    base: str, finetune: str, name: str, server: str, agreement: str = "0.9", samples: str = "256"
) -> None:
    """Publish a fine-tune whose delta predicts the same next token for at least a share `agreement` of a text."""
    with tempfile.TemporaryDirectory() as directory, peraxis.Client(server) as client:
        delta = peraxis.compress(
            base,
            finetune,
            Path(directory) / "delta.safetensors",
            min_agreement=float(agreement),
            samples=int(samples),
        )
        print(delta)

        # Its digest tells the server whether it has this version already.
        version = client.push(delta.path, name, activate=False).version
        for question in QUESTIONS:
            print(f"{question!r}: {client.generate(question, f'{name}@{version}', max_new_tokens=16).text!r}")

        client.promote(name, version)
        print(f"{name} answers as version {version}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except PeraxisError as error:
        sys.exit(f"not published: {error}")
