"""The artifact format: its header, manifest, layout and arithmetic."""
