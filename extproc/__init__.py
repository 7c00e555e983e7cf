"""An Envoy external processor that routes OpenAI-API requests to vLLM pods by LoRA adapter.

Its rooms answer one question each: bytes to messages (`wire`), a request's messages (`request`),
the choice (`routing`), who waits (`queue`), what is known of pods (`fleet`), adapters kept loaded
(`adapters`), other routers (`peers`), which pods there are (`discovery`), what else is said to
Envoy (`envoy`), what is going on (`observe`), settings (`config`), composition (`service`); and on
one machine (`stack`), at the terminal (`commands`), measured (`lab`). A policy of your own needs
only the names exported here (docs/policy-api.md).
"""

from extproc.costs import Costs
from extproc.routing.policies import Founding, Policy
from extproc.tenancy import Claim
from extproc.types import Choice, EndpointView, Hints, RequestInfo, Snapshot, Terms, Wait

__all__ = [
    "Choice",
    "Claim",
    "Costs",
    "EndpointView",
    "Founding",
    "Hints",
    "Policy",
    "RequestInfo",
    "Snapshot",
    "Terms",
    "Wait",
    "__version__",
]

__version__ = "0.1.0"
