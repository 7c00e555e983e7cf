"""The errors of a vLLM server, as in 0.32."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]


class ErrorResponse(Exception):
    """An error response; `type` is vLLM's name of the error, `param` the field at fault."""

    def __init__(self, status: int, message: str, type: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.param = param

    def openai(self) -> Json:
        """Return the body in OpenAI's format."""
        error = {"message": str(self), "type": self.type, "param": self.param, "code": self.status}
        return {"error": error}


def invalid(error: str, param: str | None = None) -> ErrorResponse:
    """Return the error of a malformed request."""
    return ErrorResponse(400, f"1 validation error:\n  {error}", "Bad Request", param)


def invalid_json(error: json.JSONDecodeError) -> ErrorResponse:
    """Return the error of a body that is not JSON."""
    loc = f"body.{error.pos}"
    details = {
        "type": "json_invalid",
        "loc": loc,
        "msg": "JSON decode error",
        "input": "<dict of 0 items>",
        "ctx": {"error": error.msg},
    }
    return invalid(str(details), loc)


def missing_field(name: str, body: Mapping[str, object]) -> ErrorResponse:
    """Return the error of a body without a required field."""
    loc = f"body.{name}"
    details = {
        "type": "missing",
        "loc": loc,
        "msg": "Field required",
        "input": f"<dict of {len(body)} items>",
    }
    return invalid(str(details), loc)


def unknown_model(model: str, base_model: str) -> ErrorResponse:
    """Return the error of a model that is not served."""
    message = f"The model `{model}` does not exist. Valid aliases: {base_model}."
    return ErrorResponse(404, message, "NotFoundError", "model")


def engine_dead() -> ErrorResponse:
    """Return the error after the engine has crashed."""
    return ErrorResponse(500, "EngineCore encountered an issue.", "InternalServerError")
