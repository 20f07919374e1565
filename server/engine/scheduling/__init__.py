"""Choose what the next step computes: queues, slots and KV cache pages."""
