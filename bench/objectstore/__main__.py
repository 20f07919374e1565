"""Run the bench."""

from __future__ import annotations

from bench.objectstore.loads import main

if __name__ == "__main__":
    main()
