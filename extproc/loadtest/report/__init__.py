"""The page about a load test, its plots and tables, and how it reads as Markdown."""
