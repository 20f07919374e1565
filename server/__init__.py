"""The service: one resident base, deltas in slots, requests of many variants."""
