"""The queue of requests that wait for room: who is asked about next, and who is refused."""
