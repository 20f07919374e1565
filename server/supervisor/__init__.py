"""The process that `peraxis serve` starts: it starts the others, watches them, and starts again those that die."""
