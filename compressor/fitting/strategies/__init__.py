"""The ways to fit deltas to text, one per value of `--solver`."""
