"""Serving: one backbone, any number of grafts, and texts of all their tasks answered together."""
