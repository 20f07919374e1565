"""Compare base, fine-tune and delta on text and tasks."""
