"""The training of the paper and of BitDelta."""
