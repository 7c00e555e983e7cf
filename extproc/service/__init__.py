"""How does it all hang together, start and stop? Composition alone: the only room of the service
with a clock and randomness (`clocks`).

Begin with `parts`, which makes all parts of one router, then `app`, which runs them from the start
to the end. `startup` has the checks before it. The commands import it.
"""
