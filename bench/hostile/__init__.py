"""Honest streams beside a hostile tenant."""
