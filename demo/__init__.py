"""The whole way, once, on this machine's CPU: train, compress, serve, ask, compare."""
