"""What the Kubernetes API says, without the I/O: from lists and watches to objects to endpoints.

`objects` is what we read of a Pod, an EndpointSlice and an InferencePool, and which requests ask
for them; `endpoints` makes endpoints of them; `store` holds the last known state of one list.
"""
