"""Other ways to answer the requests of `bench.throughput`."""
