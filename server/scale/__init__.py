"""Several replicas of an engine behind one application."""
