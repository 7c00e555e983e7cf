"""Envoy, the router and pods as supervised processes."""
