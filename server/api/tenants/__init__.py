"""Tenants on the routes: `/me`, `/tenants`, and the limits that other routes ask."""
