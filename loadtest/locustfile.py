"""A workload of the laboratory, sent to any endpoint with OpenAI's API by locust.

    locust -f loadtest/locustfile.py --host http://127.0.0.1:8080 --workload slora-7b-a10g

docs/locust.md says how to run it and what its figures mean; what it does is in `extproc.loadtest`.
"""

from __future__ import annotations

import time

from locust import User, constant, events, task

from extproc.loadtest.locust.run import LoadTest

LOAD_TEST = LoadTest(events, clock=time.monotonic, wall_clock=time.time)


class Client(User):
    """A user of the closed loop: the load test counts the users and sends their requests."""

    wait_time = constant(1)

    @task
    def wait(self) -> None:
        """Do nothing; locust wants a task."""
