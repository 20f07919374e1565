"""Tenants, their API keys and the audit log. Knows no HTTP route, no engine and no variant's content."""
