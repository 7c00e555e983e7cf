"""What else do we say to Envoy, and hear from it? Bootstraps for it, its access log, the endpoints
that it discovers, and our health.

Begin with `completions`, which reads the access log, and `endings`, which ends requests by it. The
composition of the service, and programs that start an Envoy, import this room.
"""
