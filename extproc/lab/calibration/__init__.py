"""From the measurements of a running vLLM to a profile of the engine model."""
