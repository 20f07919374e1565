"""From the engine's events to text: what every route that generates shares behind its submission."""
