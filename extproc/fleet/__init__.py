"""What do we know of the pods now? Their reports and models, what is registered, resident and
active there, what work costs them, requests in flight and how they ended, and who reads all that.

Begin with `pool`, then `endpointstate`, which is one endpoint. All rooms that decide import it; it
imports none of them.
"""
