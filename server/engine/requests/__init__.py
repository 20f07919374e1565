"""Requests in the engine, from their admission to their last event."""
