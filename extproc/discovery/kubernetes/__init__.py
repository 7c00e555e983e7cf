"""The Kubernetes API: from lists and watches to objects to endpoints, and to what they declare.

Begin with `source`, which puts it together; `apiserver` follows lists of one API server, `statuses`
writes what became of declarations.

The rest has no I/O. `objects` has the fields of a Pod, an EndpointSlice and an InferencePool, and
the queries for them. `endpoints` makes endpoints of them. `objectstore` holds the last known state
of one list.
"""
