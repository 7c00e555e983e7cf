"""A model of one vLLM engine, step by step, without a clock."""
