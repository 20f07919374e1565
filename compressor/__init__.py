"""From a base and its fine-tune to an artifact, and back to a stock checkpoint."""
