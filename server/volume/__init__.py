"""Calls of a registry whose volume may hang, fail or vanish, and what is known of it meanwhile."""
