"""Tenants on the routes: `/me`, `/tenants`, `/keys`, and the limits that other routes ask."""
