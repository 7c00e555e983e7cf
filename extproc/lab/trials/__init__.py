"""Policies judged: suites, searches, bounds, and the report about them."""
