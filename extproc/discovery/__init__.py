"""Sources that say which endpoints exist, one per file."""
