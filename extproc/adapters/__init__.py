"""Which adapters should be where, and how do they get there? Declarations, the places of each
adapter (`placement`), the plan for that, and what carries it out (`loading`); the `stores`, and
registration over HTTP.

Begin with `planner`. `routing` and what composes the service import it.
"""
