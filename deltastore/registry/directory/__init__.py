"""A registry in a directory: how its files are changed, its objects collected and all of it checked."""
