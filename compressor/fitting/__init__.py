"""Deltas fitted to what a fine-tune does with text: layer by layer, then end to end."""
