"""Two routers on one store in trouble: pods, stores, processes, and what must be so afterwards."""
