"""The names by which Envoy and the router tell each other of endpoints: dynamic metadata, headers.

In the namespace `envoy.lb` stands what the endpoint picker protocol (proposal 004) puts there, and
no more: Envoy's subset load balancer takes each key of that namespace for a criterion, so with one
more no endpoint fits. What is ours has a namespace of its own.
"""

from __future__ import annotations

DESTINATION_NAMESPACE = "envoy.lb"
DESTINATION_KEY = "x-gateway-destination-endpoint"
"""Key of the chosen endpoint in the metadata, and name of the header that says the same."""
SERVED_KEY = "x-gateway-destination-endpoint-served"
"""Key, in the same namespace, of the endpoint that has served the request."""

SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET_KEY = "x-gateway-destination-endpoint-subset"
"""Key of the endpoints among which the gateway wants one chosen."""

PICK_NAMESPACE = "extproc.pick"
PICK_ID_KEY = "id"
"""Key of the pick's id, which comes back in the access log."""
SCORES_KEY = "x-gateway-destination-endpoint-scores"
"""Key of the scores of the destination's endpoints."""

ALTERNATES_NAMESPACE = "extproc.alternates"
"""Namespace of the addresses to dial where the destination cannot be reached."""
ALTERNATE_KEYS = ("first", "second")
