"""Load tests of a running gateway: real requests, the laboratory's workloads and measures."""
