"""What else do we say to Envoy, and hear from it? Bootstraps for it, its access log, the endpoints
that it discovers, and our health.

Begin with `completions`, by which requests end. What composes the service, and those who start an
Envoy, import this room.
"""
