"""Write a Hugging Face model card about a delta."""
