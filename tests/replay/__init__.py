"""Asks two source trees the same questions, and shows where their answers differ."""
