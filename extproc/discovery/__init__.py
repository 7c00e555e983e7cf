"""Which pods are there? A file, DNS, or `kubernetes`: pods, EndpointSlices, InferencePools, and
what a cluster's objects declare.

Begin with `file`, the smallest of the sources. Only what composes the service imports this room.
"""
