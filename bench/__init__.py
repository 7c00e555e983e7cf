"""Benchmarks: a real Envoy, a real picker, instant pods, real load generators. See README.md."""
