"""Adapters that are declared: which pod should hold which, and what has to be done for it."""
