"""Which pods are there? A file, DNS, or `kubernetes`: pods, EndpointSlices, InferencePools, and
what a cluster's objects declare.

Begin with `file`, a small source; `endpointlist` has the list that all of them make. Only what
composes the service imports this room.
"""
