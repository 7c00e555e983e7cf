"""The paths that are served: the listed inference paths, and a few that we answer ourselves.

A model server exposes more than inference on its port (adapter loading, metrics, sleep, RPC into
the workers), so every other path is rejected. A path is compared in the form in which the engine's
router will see it: without its query, percent-decoded once. The request is forwarded with the path
that the client wrote. So a path that another hop could read differently (dot segments, empty
segments, double encoding) is not repaired but rejected. Resolved here and taken literally there,
`/metrics/../v1/completions` would return the metrics page. Escaped slashes are for the names of
models alone, which clients escape whole, and whose paths no pod gets. Envoy's own `normalize_path`
and `merge_slashes` come before this and do not touch a normal path.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import unquote_to_bytes

from msgspec import Struct

from extproc.types import Reason, Rejection

DEFAULT_INFERENCE_PATHS = (
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/chat/completions/render",
    "/v1/chat/completions/derender",
    "/v1/completions",
    "/v1/completions/render",
    "/v1/completions/derender",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/responses/render",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/messages/render",
    "/inference/v1/generate",
    "/cohere/v2/chat",
    "/cohere/v2/chat/render",
    "/v2/embed",
    "/v1/systemone",
    "/generative_scoring",
    "/tokenize",
    "/detokenize",
    "/v1/score",
    "/score",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/pooling",
    "/classify",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/audio/speech",
    "/v1/images/generations",
)
"""Paths that vLLM 0.32 serves by the body's `model` (entrypoints/*/api_router.py), by POST alone.

Where a pod lacks one, it returns 404 itself: `/v1/audio/speech` and `/v1/images/generations` are
vLLM-Omni's, `render`, `derender` and `generate` need `--enable-scale-out`. Left out on purpose:
`/invocations` (any of these by the look of its body), `/v1/realtime` (a websocket that names the
model in a message)."""

PREFIXED_PATHS = {"/anthropic/v1/messages": "/v1/messages", "/cohere/v2/rerank": "/v2/rerank"}
"""Paths of clients of Envoy AI Gateway, by those that pods get: it takes the prefix off, after the
router was asked. Each is served where the other one is."""

FORM_PATHS = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
"""Inference paths whose body is a multipart form; every other listed path takes JSON."""

NO_PATH = ""
"""Stands for the path of a request whose data plane does not send it."""

MODELS_PATH = "/v1/models"
HEALTH_PATHS = ("/health", "/ping")
VERSION_PATH = "/version"
_OURS = tuple(
    f"{path}/"
    for path in (
        *(MODELS_PATH, *HEALTH_PATHS, VERSION_PATH),
        "/v1/adapters",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    )
)
"""No pod gets these from a client: `adapters.registration` answers the last three, we the rest."""
RESPONSES_PATH = "/v1/responses"

ONE_PROMPT_PATHS = frozenset({"/v1/chat/completions", RESPONSES_PATH, "/v1/messages"})
"""Whose requests have one prompt, which has to fit the model's context."""

GENERATING_PATHS = ONE_PROMPT_PATHS | {NO_PATH, "/v1/completions"}
"""Where the engine surely computes the prompt, and keeps it in its KV cache; where the path is not
known it mostly does."""

FIRST_TOKEN_PATHS = GENERATING_PATHS - {RESPONSES_PATH}
"""Where a streamed response begins with the first token. vLLM begins one of `/v1/responses` with
`response.created`, before it has computed anything."""

_ABNORMAL = re.compile(r"[?#%\\]|/\.{0,2}(?:/|\Z)")
"""In a decoded path: characters that another reader could treat as a delimiter or decode once more
(an invalid escape keeps its percent sign), empty segments, dot segments."""

_STORED_RESPONSE = re.compile(rf"{RESPONSES_PATH}/([^/]+)(/cancel|/input_items)?")
_STORED_METHODS = {
    None: ("GET", "HEAD", "DELETE"),
    "/cancel": ("POST",),
    "/input_items": ("GET", "HEAD"),
}
"""OpenAI's operations on a stored response; vLLM has those of GET {id} and POST {id}/cancel."""

_UNKNOWN = Rejection(
    404,
    Reason.UNKNOWN_PATH,
    "This path is not served; inference paths, /v1/models, /health, /ping and /version are.",
)


class RouteKind(StrEnum):
    """The kind of a request."""

    INFERENCE_JSON = "inference_json"  # routed by the JSON body's `model`
    INFERENCE_FORM = "inference_form"  # routed by the multipart form's `model`
    LIST_MODELS = "list_models"  # answered by us
    GET_MODEL = "get_model"  # answered by us
    HEALTH = "health"  # answered by us
    VERSION = "version"  # answered by us
    STORED_RESPONSE = "stored_response"  # lives on one endpoint; only a session key finds it


class Route(Struct, frozen=True):
    """A request that is served."""

    kind: RouteKind
    path: str  # in normal form
    resource: str = ""  # the id of a model or a response that the path names


_READ = ("GET", "HEAD")
_ANSWERED = {
    MODELS_PATH: Route(RouteKind.LIST_MODELS, MODELS_PATH),
    **{path: Route(RouteKind.HEALTH, path) for path in HEALTH_PATHS},
    VERSION_PATH: Route(RouteKind.VERSION, VERSION_PATH),
}


@dataclass(frozen=True, slots=True)
class RouteTable:
    """The listed paths, which are routed by `model`.

    Attributes:
        listed: Their routes, of requests by POST.

    Raises ValueError for a path that is not in normal form or is one of ours.
    """

    inference_paths: Sequence[str] = DEFAULT_INFERENCE_PATHS
    listed: dict[str, Route] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for path in self.inference_paths:
            if normalize_path(path) != path or "*" in path:
                raise ValueError(
                    f"not an inference path in normal form: {path!r}; allowed: each in full, as "
                    "`/v1/completions`, without `*` and without a slash at its end"
                )
            if f"{path}/".startswith(_OURS):
                raise ValueError(f"answered by this service, so not an inference path: {path!r}")
        json, form = RouteKind.INFERENCE_JSON, RouteKind.INFERENCE_FORM
        listed = set(self.inference_paths)
        prefixed = [path for path, other in PREFIXED_PATHS.items() if other in listed]
        names = {path: PREFIXED_PATHS.get(path, path) for path in (*prefixed, *listed)}
        routes = {p: Route(form if p in FORM_PATHS else json, name) for p, name in names.items()}
        object.__setattr__(self, "listed", routes)

    def match(self, method: str, path: str) -> Route | Rejection:
        """Return the route of a request; `path` is the `:path` header, its query included.

        A path that is not listed is 404 UNKNOWN_PATH, one that does not take `method` 405
        METHOD_NOT_ALLOWED. HEAD is allowed where GET is; OPTIONS nowhere: CORS is the gateway's.
        """
        written = path.partition("?")[0]
        normal = MODELS_PATH if written == f"{MODELS_PATH}/" else normalize_path(written)
        if normal is None:
            return _UNKNOWN
        if normal.startswith(f"{MODELS_PATH}/"):
            model = normal.removeprefix(f"{MODELS_PATH}/")
            return _allow(Route(RouteKind.GET_MODEL, normal, model), method, _READ)
        if "%2f" in written.lower():
            return _UNKNOWN
        ours = _ANSWERED.get(normal)
        if ours is not None:
            return _allow(ours, method, _READ)
        route = self.listed.get(normal)
        if route is not None:
            return _allow(route, method, ("POST",))
        return self._match_stored_response(method, normal)

    def _match_stored_response(self, method: str, normal: str) -> Route | Rejection:
        found = _STORED_RESPONSE.fullmatch(normal)
        if found is None or RESPONSES_PATH not in self.listed:
            return _UNKNOWN
        route = Route(RouteKind.STORED_RESPONSE, normal, found[1])
        return _allow(route, method, _STORED_METHODS[found[2]])


def match_without_path(method: str, content_type: str) -> Route | Rejection:
    """Return the route of a request whose path is not sent: it counts as inference.

    Gateways without pseudo-headers ask only about requests that their own routes send to inference.
    """
    is_form = content_type.strip().lower().startswith("multipart/")
    kind = RouteKind.INFERENCE_FORM if is_form else RouteKind.INFERENCE_JSON
    return _allow(Route(kind, NO_PATH), method, ("POST",))


def path_label(path: str) -> str:
    """Return `path`, in normal form, as a label: with a placeholder for a response's id.

    For routed paths only: clients can make up any number of other paths.
    """
    if not path.startswith(RESPONSES_PATH):
        return path
    found = _STORED_RESPONSE.fullmatch(path)
    return path if found is None else f"{RESPONSES_PATH}/{{id}}{found[2] or ''}"


def normalize_path(path: str) -> str | None:
    """Return the path that an engine's router compares: no query, percent-decoded once.

    None where readers could disagree about it. That is a path that does not start with `/`
    (absolute form, `*`), has invalid escapes, is not UTF-8, or has control characters. It is also
    one with `?`, `#`, `%` or a backslash after decoding, with empty segments (so the root and a
    trailing slash too), or with dot segments. Idempotent.
    """
    normal = path.partition("?")[0]
    if not normal.startswith("/"):
        return None
    if "%" in normal:
        try:
            normal = unquote_to_bytes(normal).decode()
        except UnicodeError:
            return None
    return None if not normal.isprintable() or _ABNORMAL.search(normal) else normal


def _allow(route: Route, method: str, methods: tuple[str, ...]) -> Route | Rejection:
    if method in methods:
        return route
    message = f"This path takes {' or '.join(methods)} only."
    return Rejection(405, Reason.METHOD_NOT_ALLOWED, message, allowed_methods=methods)
