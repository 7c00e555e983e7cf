"""Namespaces and keys of Envoy's dynamic metadata: what passes between it and the picker unseen.

In `envoy.lb` stands what the endpoint picker protocol (proposal 004) puts there, and no more:
Envoy's subset load balancer takes each key of that namespace for a criterion, so with one more no
endpoint fits. What is ours has a namespace of its own.
"""

from __future__ import annotations

DESTINATION_NAMESPACE = "envoy.lb"
DESTINATION_KEY = "x-gateway-destination-endpoint"
"""Of the chosen endpoint, as metadata and as a header."""
SERVED_KEY = "x-gateway-destination-endpoint-served"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET_KEY = "x-gateway-destination-endpoint-subset"

PICK_NAMESPACE = "extproc.pick"
PICK_ID_KEY = "id"
"""Of the pick's id; it comes back in the access log."""
SCORES_KEY = "x-gateway-destination-endpoint-scores"

ALTERNATES_NAMESPACE = "extproc.alternates"
"""Of the addresses to dial where the destination's one cannot be reached."""
ALTERNATE_KEYS = ("first", "second")
