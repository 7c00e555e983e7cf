"""How good is it? Everything that measures. `workload` has requests as values, `engine` a model of
one vLLM engine, `fakepod` that model in real time behind vLLM's HTTP. `fleet` has pods, routers and
clients in virtual time, `trials` suites, searches, bounds and reports. Further there are
`calibration`, `opponents`, and `loadtest` (real requests to a running gateway).

The judged code ships unchanged: the router's own parts run in it. The commands import it.
"""
