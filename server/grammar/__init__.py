"""Constrained output: what clients ask becomes a grammar, and a grammar the tokens that may come next."""
