"""What is going on, and why? Metrics, published decisions and their words, the live page, spans,
log lines. Nothing here changes a decision, and no request depends on it.

Begin with `telemetry` and `decisions`. The composition of the service imports it.
"""
