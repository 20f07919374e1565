"""Routes that operators and their tools ask: health, metrics and statistics."""
