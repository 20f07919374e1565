"""Train scales and signs end to end against the fine-tune."""
