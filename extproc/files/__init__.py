"""How is a file read that an operator names? Bounded, followed where it changes, YAML with a limit.

Begin with `reading`. Every room may import it; it imports nothing of ours but the shared words.
"""
