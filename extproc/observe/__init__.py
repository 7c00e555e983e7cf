"""What is going on, and why? Metrics, published decisions and their words, the live page, spans,
log lines. Nothing here changes what is decided, and no request depends on it.

Begin with `telemetry` and `decisions`. What composes the service imports it.
"""
