"""Artifacts that the server fetches itself: from a hub, or from a directory that its operator allowed."""
