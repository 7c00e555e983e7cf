"""The room that decides.

1. Everything here is synchronous and pure: no I/O, no `await`, no clock, no logging, no protobuf,
   no Prometheus, no module-level randomness. `now` (monotonic seconds) and `rng` are arguments.
2. Values come in, values go out. Two kinds of object hold state: the `Pool` (one per process) and
   the `Stream` (one per HTTP request). One event loop calls them, so each call is atomic.
3. Policies and admission see a `Snapshot`, never the `Pool`.
4. Expected outcomes (saturated, unknown model) are `Rejection` values; exceptions are for
   malformed input and broken protocol.
"""
