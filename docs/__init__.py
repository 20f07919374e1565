"""Programs that write documentation."""
