"""Tenants, their API keys and the audit log."""
