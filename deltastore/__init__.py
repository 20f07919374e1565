"""The artifact format, the registry on disk and the loader. Imports no other package of Peraxis and builds no model."""
