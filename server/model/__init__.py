"""The base model: loaded once, made delta-aware, and never written to afterwards."""
