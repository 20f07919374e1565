"""Plain values that HTTP processes, the engine process and the supervisor exchange. Imports neither torch nor zmq."""
