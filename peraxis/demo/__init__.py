"""A demonstration on the CPU: train, compress, serve, ask and compare. Talks to the server over HTTP alone."""
