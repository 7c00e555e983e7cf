"""The names of the dynamic metadata and headers by which Envoy and the router name endpoints.

The namespace `envoy.lb` holds only the keys of the endpoint picker protocol (proposal 004). Envoy's
subset load balancer treats each key of that namespace as a criterion, so with one more no endpoint
matches. Our own keys have their own namespaces.
"""

from __future__ import annotations

DESTINATION_NAMESPACE = "envoy.lb"
DESTINATION_KEY = "x-gateway-destination-endpoint"
"""Key of the chosen endpoint in the metadata, and name of the header with the same value."""
SERVED_KEY = "x-gateway-destination-endpoint-served"
"""Key, in the same namespace, of the endpoint that has served the request."""

SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET_KEY = "x-gateway-destination-endpoint-subset"
"""Key of the endpoints that the gateway allows."""

PICK_NAMESPACE = "extproc.pick"
PICK_ID_KEY = "id"
"""Key of the pick's id, which comes back in the access log."""
SCORES_KEY = "x-gateway-destination-endpoint-scores"
"""Key of the scores of the destination's endpoints."""

MARK_HEADER = "x-extproc-decision"
"""Header of a request that has been decided, by which further calls about it are known."""

ALTERNATES_NAMESPACE = "extproc.alternates"
"""Namespace of the addresses to dial where the destination cannot be reached."""
ALTERNATE_KEYS = ("first", "second")
