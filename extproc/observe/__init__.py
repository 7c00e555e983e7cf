"""What is going on, and why? Metrics, published decisions and their words, the admin port and its
live page, spans, log lines. Nothing here changes a decision, and no request depends on it.

Begin with `recorder`, which hears what becomes of requests, then `telemetry` and `decisions`. The
composition of the service imports it.
"""
