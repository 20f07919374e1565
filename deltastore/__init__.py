"""The artifact format, the registry on disk and the loader: everything about a delta that is not a model."""
