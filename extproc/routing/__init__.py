"""Which pod? The router, models and their routes, admission, and the policies.

Begin with `router`, which asks the `picker`, which asks a policy in `policies`. `request` and what
composes the service import it.
"""
