"""Compare two variants, or two versions of one, on the same prompts: where their answers part, and how fast they are.

Run it as: python examples/compare.py SERVER ONE OTHER PROMPT...
"""

import asyncio
import sys

import peraxis


async def main(server: str, one: str, other: str, *prompts: str) -> None:
    """Ask both at the same time, greedily, and print what they share and what each one says from there on."""
    async with peraxis.AsyncClient(server) as client:
        for prompt in prompts:
            answers = await asyncio.gather(
                *(client.generate(prompt, name, max_new_tokens=32, temperature=0) for name in (one, other))
            )
            first, second = (answer.text for answer in answers)
            pairs = enumerate(zip(first, second, strict=False))
            length = next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
            shared = first[:length]
            print(
                f"{prompt!r}: both begin {shared!r}" if shared else f"{prompt!r}: they differ from the start"
            )
            if first != second:
                print(f"  {one}: {first[length:]!r}\n  {other}: {second[length:]!r}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
