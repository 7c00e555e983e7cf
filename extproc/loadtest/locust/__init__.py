"""What runs inside locust: the plan, the senders, the figures of a running test."""
