"""Load tests inside locust: the plan, the workers, the figures of a running test."""
