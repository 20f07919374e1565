"""Fit each linear layer to its calibration inputs."""
