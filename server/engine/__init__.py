"""Requests in, tokens out: one thread owns the model and its device."""
