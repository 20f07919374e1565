"""The base model: loaded once, made delta-aware, never written to."""
