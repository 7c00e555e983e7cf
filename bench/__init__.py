"""Benchmarks: a real Envoy, a real router, instant pods, real load generators. See README.md."""
