"""A workload of the laboratory, sent to any endpoint with OpenAI's API by locust.

    locust -f loadtest/locustfile.py --host http://127.0.0.1:8080 --workload slora-7b-a10g

docs/loadtest.md says how to run it and what its figures mean; what it does is in
`extproc.lab.loadtest`.
"""

from __future__ import annotations

import time

from locust import events

from extproc.lab.loadtest.locust.users import LoadTest, WorkloadUser


class Client(WorkloadUser):
    """Sends the workload that the options describe."""

    load_test = LoadTest(events, clock=time.monotonic, wall_clock=time.time)
