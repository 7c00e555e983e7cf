"""One-line descriptions of the opponents, for reports."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

DESCRIPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "random": "any server",
        "round_robin": "one server after the other",
        "least_request_p2c": "the less busy of two drawn at random (Envoy)",
        "least_pending": "the server with the fewest unfinished requests",
        "rendezvous": "the server that the adapter's name hashes to, whatever its load",
        "bounded_loads": "the server that the name hashes to, or the next one that is not "
        "above 1.25 times the mean load",
        "dedicated_pods": "adapters dealt out to servers like cards",
        "founding": "where the adapter is and the most requests wait for it, up to 16; else, and "
        "where as many wait, the server with the fewest adapters in use (the default of this "
        "project)",
        "least_harm": "the server where the request costs itself and the others there least, by "
        "an estimate in seconds",
        "founding_as_shipped": "`founding`, never leaving a server for its load (the first proof "
        "of concept)",
        "filter_tree_v01": "the decision tree of the Gateway API Inference Extension's first "
        "release",
        "filter_tree_as_shipped": "`filter_tree_v01`, seeing metrics pages alone, as in life",
        "llmd_lora_affinity": "llm-d's weighted scores for adapter, queue and memory, with this "
        "project's knowledge of the servers",
        "llmd_as_shipped": "`llmd_lora_affinity`, seeing metrics pages alone, as in life",
        "llmd_in_flight_as_shipped": "the same with its own number of requests instead of queues",
        "llmd_load_state": "llm-d's scores with the one proposed next: which adapters are loaded",
        "lmetric": "least of queued prompt tokens x batch size (LMetric, as published)",
        "lmetric_with_loads": "LMetric with a price for loading an adapter and for a full server",
        "dynamo_sticky": "homes for each adapter in proportion to its traffic (NVIDIA Dynamo)",
        "dynamo_sticky_hold_slots": "`dynamo_sticky`, holding requests back while no adapter "
        "place is free",
        "founding_hold_slots": "`founding`, holding requests back while no adapter place is free",
        "slora_fcfs": "a queue in front of the servers, the oldest first (S-LoRA)",
        "slora_lcfs": "the same, the newest first",
        "slora_abort": "the same; under overload as many of the newest as can be in time",
        "slora_clusters": "`slora_fcfs`, requests for the adapters in use first",
    }
)
