"""Say before any work what a run needs, and refuse a run that cannot succeed."""
