"""Read checkpoint pairs and write artifacts."""
