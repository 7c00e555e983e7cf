"""Where each adapter should be, and on how many endpoints.

Routers do not talk to each other about it. They see the same and arrive at the same, or see nearly
the same and arrive at nearly the same. Everything that they see passes through steps (`levels`).
The place of an adapter depends on its name and the endpoints' addresses (`orders`), bounded by the
load of each endpoint (`homes`).

Sources: rendezvous hashing (Thaler and Ravishankar, IEEE/ACM ToN 1998), with bounded loads
(Mirrokni, Thorup and Zadimoghaddam, arXiv 1608.01350); replicas as few as balance needs, because
each takes a slot that another adapter lacks.
"""
