"""A Hugging Face decoder that runs one block at a time."""
