"""An Envoy external processor that routes OpenAI-API requests to vLLM pods by LoRA adapter.

Its packages have one subject each. A request passes `wire` (bytes to messages), `request` (its
messages), `routing` (the choice) and `queue` (held requests). The state is in `pods`, with what
they say in `reports` and what is believed of their costs in `learned`, in `adapters` (adapters kept
loaded), `peers` (other routers) and `discovery` (the list of pods).
Around them are `envoy` (further services for Envoy), `observe` (metrics and decisions), `config`
(settings) and `service` (composition). `stack` runs processes on one machine, `commands` is the
command line, `lab` measures. A policy of your own needs only the names exported here
(docs/policy-api.md).
"""

from extproc.costs import Costs, Decode
from extproc.routing.policies import Founding, Policy
from extproc.tenancy import Claim
from extproc.types import Choice, EndpointView, Hints, RequestInfo, Snapshot, Terms, Wait

__all__ = [
    "Choice",
    "Claim",
    "Costs",
    "Decode",
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
