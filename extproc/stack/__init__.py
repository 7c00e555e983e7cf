"""How are Envoy, router and pods run on one machine? As supervised processes, for `up`, the demo,
load tests, benchmarks and end-to-end tests.

Begin with `processes`.
"""
