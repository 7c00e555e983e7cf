"""Envoy, routers and pods as supervised processes."""
