"""Composition: the only room of the service with a clock and randomness."""
