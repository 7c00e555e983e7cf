"""An Envoy external processor that routes OpenAI-API requests to vLLM pods by LoRA adapter.

`core` decides (pure, synchronous), `shell` translates one outside thing per file, `app` wires the
two together, `sim` models engines and fleets and runs the real core. A policy of your own needs
only the names exported here.
"""

from extproc.core.policies import Founding, Policy
from extproc.core.types import Choice, EndpointView, Hints, RequestInfo, Snapshot, Wait

__all__ = [
    "Choice",
    "EndpointView",
    "Founding",
    "Hints",
    "Policy",
    "RequestInfo",
    "Snapshot",
    "Wait",
    "__version__",
]

__version__ = "0.1.0"
