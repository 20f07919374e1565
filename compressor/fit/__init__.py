"""Fit deltas to text: layer by layer, then end to end."""
