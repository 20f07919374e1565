"""Commands that talk to a running server over HTTP, and the clients of which they are made."""
