"""A fake vLLM pod: the engine model in real time behind vLLM's HTTP endpoints."""
