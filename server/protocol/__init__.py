"""Plain values that HTTP processes, the engine process and the supervisor exchange, and the links that carry them."""
