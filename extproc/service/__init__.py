"""How does it all hang together, start and stop? Composition: the only room of the service with a
clock and randomness (`clocks`).

Begin with `app`, one running service from its configuration to its end. The commands import it.
"""
