"""The page about a load test: plots, tables and words."""
