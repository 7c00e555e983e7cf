"""What do pods say of themselves? From HTTP to a load report: the client, when each pod is asked,
how its page is read, each engine's names for its metrics, its models, version and health.

Begin with `scraper`, then `exposition`. No room that decides is imported here.
"""
