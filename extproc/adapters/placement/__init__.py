"""Where each adapter should be, and on how many endpoints.

Routers do not talk to each other about it. They arrive at the same as they see the same, and at
nearly the same as they see nearly the same: everything that they see passes through steps
(`levels`), and where an adapter goes is a matter of its name and the endpoints' addresses
(`orders`), bounded by what each endpoint carries (`homes`).

Sources: rendezvous hashing (Thaler and Ravishankar, IEEE/ACM ToN 1998), with bounded loads
(Mirrokni, Thorup and Zadimoghaddam, arXiv 1608.01350); replicas as few as balance needs, because
each takes a slot that another adapter lacks.
"""

from extproc.adapters.placement.homes import Capacity, Placement
from extproc.adapters.placement.levels import Demand, Levels
from extproc.adapters.placement.orders import order

__all__ = ["Capacity", "Demand", "Levels", "Placement", "order"]
