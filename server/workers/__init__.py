"""Killable worker processes for tenants' input, and the order in which tenants use them."""
