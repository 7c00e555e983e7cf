"""The errors that clients get from us, worded in one place."""

from __future__ import annotations

from msgspec.structs import replace

from extproc.types import Reason, Rejection

RETRY_AFTER_S = 1
"""A pool changes within a scrape or a watch event; a second is enough to see it."""
UNREAD_RETRY_AFTER_S = 5
"""Declarations that cannot be read are tried again so often."""

NO_MEMORY = Rejection(
    429,
    Reason.MEMORY,
    "Too many large request bodies are in progress. Retry later.",
    retry_after_s=RETRY_AFTER_S,
)

TOO_MANY_LISTS = Rejection(
    429,
    Reason.TOO_MANY_LISTS,
    "The list of models is requested too often. Retry later.",
    retry_after_s=RETRY_AFTER_S,
)

ENCODED_BODY = Rejection(
    415, Reason.ENCODED_BODY, "The request body must not be compressed (content-encoding)."
)
"""A compressed body's model cannot be read."""

EXPECTATION_FAILED = Rejection(
    417,
    Reason.EXPECTATION_FAILED,
    "This gateway answers no `Expect: 100-continue`. Send the request without that header.",
)
"""The data plane leaves the 100 to the endpoint, which is chosen by the body."""

NO_WEBSOCKETS = Rejection(
    426, Reason.NO_WEBSOCKETS, "Websockets are not served here: send the request by POST."
)
"""It goes without `Upgrade`: that would name a protocol to change to, and there is none."""


def invalid_json(problem: str, at: int) -> Rejection:
    """Return the refusal of a body that has a problem near a byte."""
    message = f"The request body is not valid JSON: {problem} (near byte {at})."
    return Rejection(400, Reason.INVALID_JSON, message)


EMPTY_BODY = Rejection(400, Reason.INVALID_JSON, "The request body is empty.", param="model")

MISSING_MODEL = Rejection(
    400,
    Reason.MISSING_MODEL,
    "The request body must be a JSON object with a string field `model`.",
    param="model",
)
"""The data plane read the body and found no model."""

TWO_MODELS = Rejection(
    400, Reason.INVALID_BODY, "The request body names more than one `model`.", param="model"
)
"""The body goes on to name another model than the one that routed it."""

MANY_ADAPTERS = Rejection(
    400, Reason.INVALID_BODY, "`lora_path` must be the name of one adapter.", param="lora_path"
)
"""An engine would take one for each prompt of a batch, and they may be on different endpoints."""

BODY_NOT_SENT = Rejection(
    500,
    Reason.BODY_NOT_SENT,
    "The gateway does not send the request body in time to read `model`. Its ext_proc filter needs "
    "request_body_mode BUFFERED or FULL_DUPLEX_STREAMED, or STREAMED with "
    "send_body_without_waiting_for_header_response, or allow_mode_override in the filter and in "
    "the router.",
)

NOT_REWRITABLE = Rejection(
    500,
    Reason.NOT_REWRITABLE,
    "The gateway does not send the request body in a way in which `model` can be rewritten. Its "
    "ext_proc filter needs request_body_mode BUFFERED or FULL_DUPLEX_STREAMED.",
    param="model",
)
"""Pods know its model by another name, and the body is not ours to change."""

RENAMED = Rejection(
    503,
    Reason.ADAPTER_UNAVAILABLE,
    "The adapter's version changed while the request was held. Retry.",
    param="model",
    retry_after_s=RETRY_AFTER_S,
)
"""Likewise since it was held: its body was not kept."""

NOT_RENAMED = {"": None, "gateway": NOT_REWRITABLE, "held": RENAMED}
"""By `RequestInfo.fixed`."""

STORED_RESPONSE = Rejection(
    400,
    Reason.STORED_RESPONSE,
    "A stored response is kept on one pod, which the router cannot find again. Send the whole "
    "conversation, or its name in a header that the operator has in request.session_sources.",
    param="previous_response_id",
)

_SATURATED = "rejected-saturated"
_DROPPED_REASONS = {
    Reason.NO_ENDPOINTS: "rejected-no-endpoints",
    Reason.SHUTTING_DOWN: "rejected-shutting-down",
    Reason.ASLEEP: "rejected-no-endpoints",
    Reason.RANK_TOO_HIGH: "rejected-no-endpoints",
    Reason.ADAPTER_UNAVAILABLE: "rejected-no-endpoints",
    Reason.ADAPTERS_UNKNOWN: "rejected-no-endpoints",
    Reason.SATURATED: _SATURATED,
    Reason.LATE: _SATURATED,
    Reason.MEMORY: _SATURATED,
    Reason.TOO_MANY_LISTS: _SATURATED,
}


def dropped(rejection: Rejection) -> dict[str, str]:
    """Return llm-d's header that says why a request was dropped.

    None unless it was for want of endpoints, capacity or memory.
    """
    reason = _DROPPED_REASONS.get(rejection.reason)
    if reason == _SATURATED and rejection.is_expired:
        reason = "rejected-ttl-expired"
    return {} if reason is None else {"x-llm-d-request-dropped-reason": reason}


def model_not_found(model: str) -> Rejection:
    """404: no endpoint has the model registered."""
    message = f"The model `{model}` does not exist."
    return Rejection(404, Reason.MODEL_NOT_FOUND, message, param="model", model=model)


def _for_later(
    status: int,
    reason: Reason,
    message: str,
    model: str,
    after_s: int = RETRY_AFTER_S,
    *,
    param: str | None = None,
    why: str = "",
) -> Rejection:
    return Rejection(status, reason, message, param, after_s, model=model, why=why)


def no_endpoints(model: str = "", why: str = "") -> Rejection:
    """503: the model may exist, but no endpoint that could serve it is ready."""
    message = "No pod is ready for this model. Retry later."
    return _for_later(503, Reason.NO_ENDPOINTS, message, model, why=why)


def policy_failed(model: str) -> Rejection:
    """503: the policy raised an error, or chose what it may not; the router's log says which."""
    message = "The router's policy failed. The operator finds the error in the router's log."
    return _for_later(503, Reason.POLICY_FAILED, message, model)


def asleep(model: str) -> Rejection:
    """503: the endpoints that have the model sleep; somebody has to wake them."""
    message = "Every pod that serves this model is asleep. Retry once one is awake."
    return _for_later(503, Reason.ASLEEP, message, model)


def adapter_unavailable(model: str, reason: str = "", why: str = "") -> Rejection:
    """503: a declared adapter that no pod has, or could load; `reason` is a slug."""
    if reason:
        message = f"The adapter `{model}` cannot be loaded now ({reason}). Retry later."
    else:
        message = f"The adapter `{model}` is not loaded yet. Retry later."
    return _for_later(503, Reason.ADAPTER_UNAVAILABLE, message, model, param="model", why=why)


def adapters_unknown(model: str) -> Rejection:
    """503: what is declared of a name has not been read, so that nobody may use it as yet."""
    message = f"The declaration of the model `{model}` has not been read yet. Retry later."
    after_s = UNREAD_RETRY_AFTER_S
    return _for_later(503, Reason.ADAPTERS_UNKNOWN, message, model, after_s, param="model")


def rank_too_high(model: str, rank: int, limit: int) -> Rejection:
    """503: endpoints for larger ranks may come, but those that are ready take up to `limit`."""
    message = (
        f"This adapter has rank {rank}, and the pods that are ready for it take ranks up to "
        f"{limit}. Retry later."
    )
    return _for_later(503, Reason.RANK_TOO_HIGH, message, model, param="model")


def saturated(
    model: str, retry_after_s: int, why: str = "", *, is_expired: bool = False
) -> Rejection:
    """429: every endpoint that could serve the model is at its cap, and was all the time that the
    request could wait, if it `is_expired`."""
    message = "Every pod that serves this model is saturated. Retry later."
    made = _for_later(429, Reason.SATURATED, message, model, retry_after_s, why=why)
    return replace(made, is_expired=True) if is_expired else made


def shutting_down(model: str, why: str = "") -> Rejection:
    """503: this router stops, and the request was held here. Another one takes it."""
    message = "The router is shutting down. Retry."
    return _for_later(503, Reason.SHUTTING_DOWN, message, model, why=why)


def late(model: str, retry_after_s: int, why: str = "") -> Rejection:
    """429: the first token would come later than the request's objective."""
    message = "The first token of the response would come too late. Retry later."
    return _for_later(429, Reason.LATE, message, model, retry_after_s, why=why)


def steers(name: str) -> Rejection:
    """A field of the body is for the engine's router, and cannot be removed here."""
    message = f"The field `{name}` is not for clients here."
    return Rejection(400, Reason.INVALID_BODY, message, param=name)


def invalid_header(name: str, allowed: str) -> Rejection:
    """400: a control header's value cannot be used."""
    message = f"The header `{name}` must be {allowed}."
    return Rejection(400, Reason.INVALID_HEADER, message, param=name)


def too_large(limit_bytes: int) -> Rejection:
    """413: the body is over the limit, or its model lies behind what could be read."""
    message = (
        "The request body is too large, or `model` lies too far from its start "
        f"(limit {limit_bytes} bytes)."
    )
    return Rejection(413, Reason.BODY_TOO_LARGE, message)
