"""Token ids of running sequences to visible text: incremental decoding and stop strings."""
