"""Which adapters should be where, and how do they get there? What is declared of them, where each
should be (`placement`), what has to be done for that, and calls to pods; their `stores`, and
registration over HTTP.

Begin with `planner`. `routing` and what composes the service import it.
"""
