"""The Kubernetes API without the I/O: from lists and watches to objects to endpoints.

`objects` has the fields of a Pod, an EndpointSlice and an InferencePool, and the queries for them;
`endpoints` makes endpoints of them; `store` holds the last known state of one list.
"""
