"""Load tests inside locust: the plan of a test, and the user class that sends it."""
