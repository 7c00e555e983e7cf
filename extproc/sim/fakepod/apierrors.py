"""The errors of a vLLM server, in the words and shapes of 0.32."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]


class ApiError(Exception):
    """An error answer in vLLM's shape.

    Args:
        status: HTTP status.
        message: For the client.
        type: vLLM's name of the kind of error.
        param: The field at fault.
    """

    def __init__(self, status: int, message: str, type: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.param = param

    def openai(self) -> Json:
        """The body in OpenAI's shape."""
        error = {"message": str(self), "type": self.type, "param": self.param, "code": self.status}
        return {"error": error}


def invalid(error: str, param: str | None = None) -> ApiError:
    """A request that does not have the form its endpoint wants."""
    return ApiError(400, f"1 validation error:\n  {error}", "Bad Request", param)


def invalid_json(error: json.JSONDecodeError) -> ApiError:
    """A body that is not JSON."""
    loc = f"body.{error.pos}"
    details = {
        "type": "json_invalid",
        "loc": loc,
        "msg": "JSON decode error",
        "input": "<dict of 0 items>",
        "ctx": {"error": error.msg},
    }
    return invalid(str(details), loc)


def missing_field(name: str, body: Mapping[str, object]) -> ApiError:
    """A body without a field that its endpoint needs."""
    loc = f"body.{name}"
    details = {
        "type": "missing",
        "loc": loc,
        "msg": "Field required",
        "input": f"<dict of {len(body)} items>",
    }
    return invalid(str(details), loc)


def unknown_model(model: str, base_model: str) -> ApiError:
    """A model that this server does not serve."""
    message = f"The model `{model}` does not exist. Valid aliases: {base_model}."
    return ApiError(404, message, "NotFoundError", "model")


def engine_dead() -> ApiError:
    """The engine behind the server has ended."""
    return ApiError(500, "EngineCore encountered an issue.", "InternalServerError")
