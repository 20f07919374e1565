"""A cluster of replicas, simulated with the server's own routing code."""
