"""Tests of calls of a registry whose volume fails."""
