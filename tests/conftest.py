"""What all tests share."""

from hypothesis import settings

# A shared or slow machine is no failure: what a property costs is for the benchmarks to say.
settings.register_profile("extproc", deadline=None)
settings.load_profile("extproc")
