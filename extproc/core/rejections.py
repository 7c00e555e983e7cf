"""The errors that clients get from us, worded in one place."""

from __future__ import annotations

from extproc.core.types import Reason, Rejection

RETRY_AFTER_S = 1
"""A pool changes within a scrape or a watch event; a second is enough to see it."""

_DROPPED_REASONS = {
    Reason.NO_ENDPOINTS: "rejected-no-endpoints",
    Reason.SATURATED: "rejected-saturated",
    Reason.MEMORY: "rejected-saturated",
}


def dropped(rejection: Rejection) -> dict[str, str]:
    """The header by which llm-d tells clients why a request was dropped: of all 503 and 429."""
    reason = _DROPPED_REASONS.get(rejection.reason)
    return {} if reason is None else {"x-llm-d-request-dropped-reason": reason}


def model_not_found(model: str) -> Rejection:
    """404: no endpoint has the model registered."""
    message = f"The model `{model}` does not exist."
    return Rejection(404, Reason.MODEL_NOT_FOUND, message, param="model", model=model)


def no_endpoints(model: str = "") -> Rejection:
    """503: the model may exist, but no endpoint that could serve it is ready."""
    message = "No endpoint is ready for this model. Retry later."
    return Rejection(503, Reason.NO_ENDPOINTS, message, retry_after_s=RETRY_AFTER_S, model=model)


def saturated(model: str, retry_after_s: int) -> Rejection:
    """429: every endpoint that could serve the model is at its cap."""
    message = "Every endpoint that serves this model is saturated. Retry later."
    return Rejection(429, Reason.SATURATED, message, retry_after_s=retry_after_s, model=model)


def no_memory() -> Rejection:
    """429: the body does not fit beside what other requests hold."""
    message = "Too many large request bodies are under way. Retry later."
    return Rejection(429, Reason.MEMORY, message, retry_after_s=RETRY_AFTER_S)


def encoded_body() -> Rejection:
    """415: the body is compressed, so its model cannot be read."""
    message = "The request body must not be compressed (content-encoding)."
    return Rejection(415, Reason.ENCODED_BODY, message)


def empty_body() -> Rejection:
    """400: an inference request without a body."""
    return Rejection(400, Reason.INVALID_JSON, "The request body is empty.", param="model")


def missing_model() -> Rejection:
    """400: the data plane read the body and found no model."""
    message = "The request body must be a JSON object with a string field `model`."
    return Rejection(400, Reason.MISSING_MODEL, message, param="model")


def two_models() -> Rejection:
    """400: the body goes on to name another model than the one that it is routed by."""
    message = "The request body names more than one `model`."
    return Rejection(400, Reason.INVALID_BODY, message, param="model")


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


def body_not_sent() -> Rejection:
    """500: the data plane's configuration keeps the model from us."""
    message = (
        "The gateway does not send the request body in time to read `model`. Its ext_proc filter "
        "needs request_body_mode BUFFERED or FULL_DUPLEX_STREAMED, or STREAMED with "
        "send_body_without_waiting_for_header_response, or allow_mode_override here and there."
    )
    return Rejection(500, Reason.BODY_NOT_SENT, message)


def stored_response() -> Rejection:
    """400: a stored response lives on one endpoint, and nothing tells us which."""
    message = (
        "Stored responses live on one endpoint and cannot be found again here: send the whole "
        "conversation, or ask the operator to configure a session header."
    )
    return Rejection(400, Reason.STORED_RESPONSE, message, param="previous_response_id")
