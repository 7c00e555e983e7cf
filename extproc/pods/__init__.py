"""What do we know of the pods now? The state that decisions read, in columns: what is registered,
resident and active, requests in flight and how they end, what other routers sent.

Begin with `pool`, then `tracked`, which is one endpoint; `scraping` brings both what pods say. All
rooms that decide import it; it imports none of them.
"""
