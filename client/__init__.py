"""Commands that talk to a running server over HTTP. Knows neither torch nor the server's code."""
