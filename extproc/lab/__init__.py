"""How good is it? Everything that measures: `workload` (requests as values), `engine` (a model of
one vLLM engine), `fakepod` (that model in real time behind vLLM's HTTP), `fleet` (pods, routers and
clients in virtual time), `calibration`, `opponents`, `trials` (suites, searches, bounds, reports),
and `loadtest` (real requests to a running gateway).

What is judged here ships unchanged: the router's own parts run in it. The commands import it.
"""
