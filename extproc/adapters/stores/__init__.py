"""Stores of adapters' declarations: what is common to all, and one file per medium."""
