"""A fleet in virtual time: pods, routers and clients around the engine model."""
