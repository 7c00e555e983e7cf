"""What do other routers do? The links to them, and what goes over those: ends of requests that they
picked, picks, who waits, and updates on adapters.

Begin with `peering`, which keeps the links, then `links`. Only what composes the service imports
this room.
"""
