"""The files that one request and one delta pass through, as a running server shows them."""
