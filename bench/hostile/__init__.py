"""Measures honest streams beside a hostile tenant."""
