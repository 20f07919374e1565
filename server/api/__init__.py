"""The HTTP routes: parse at the edge, ask the engine and the registry, answer. Only they and app.py know HTTP."""
