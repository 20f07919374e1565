"""Measurements: one file per question, each prints a table and writes JSON under results/."""
