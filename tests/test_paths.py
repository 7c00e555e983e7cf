"""Only listed paths pass, however they are written."""

from __future__ import annotations

from urllib.parse import quote, unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.paths import (
    DEFAULT_INFERENCE_PATHS,
    FORM_PATHS,
    PREFIXED_PATHS,
    Route,
    RouteKind,
    RouteTable,
    match_without_path,
    normalize_path,
    path_label,
)
from extproc.types import Reason, Rejection

TABLE = RouteTable()

segments = st.sampled_from(
    [
        *("v1", "chat", "completions", "models", "responses", "metrics", "load_lora_adapter", "a"),
        *("", ".", "..", "%2e%2e", "%2E", "..%2f", "%2f", "%252e%252e", "%00", "%", "%zz", "%ff"),
        *("health", "ping", "version", "a%2Fb", "a%2f..%2fb"),
        *("%c3%a9", "é", "v1;x", "\\", "#", "?", "?x=/v1/models", "%3f", "%23", "%5c", "%0a", " "),
    ]
)
hostile_paths = st.lists(segments, max_size=7).map("/".join) | st.builds(
    "/{}".format, st.lists(segments, max_size=7).map("/".join)
)
listed_paths = st.sampled_from(DEFAULT_INFERENCE_PATHS)


def route(method: str, path: str, table: RouteTable = TABLE) -> Route:
    found = table.match(method, path)
    assert isinstance(found, Route)
    return found


def rejection(method: str, path: str, table: RouteTable = TABLE) -> tuple[int, Reason]:
    found = table.match(method, path)
    assert isinstance(found, Rejection)
    return found.status, found.reason


class TestInference:
    @pytest.mark.parametrize("path", DEFAULT_INFERENCE_PATHS)
    def test_is_routed_by_its_listed_path(self, path: str) -> None:
        kind = RouteKind.INFERENCE_FORM if path in FORM_PATHS else RouteKind.INFERENCE_JSON

        assert route("POST", path) == Route(kind, path)

    @pytest.mark.parametrize(("path", "of_pods"), PREFIXED_PATHS.items())
    def test_is_routed_by_the_path_of_ai_gateway_s_clients_as_by_that_of_pods(
        self, path: str, of_pods: str
    ) -> None:
        assert route("POST", path) == Route(RouteKind.INFERENCE_JSON, of_pods)
        assert route("POST", f"{path}?beta=true") == Route(RouteKind.INFERENCE_JSON, of_pods)
        assert rejection("GET", path) == (405, Reason.METHOD_NOT_ALLOWED)
        for listed in ((path,), (path, of_pods), (of_pods,)):
            assert route("POST", path, RouteTable(listed)).path == of_pods
        others = RouteTable(["/v1/completions"])
        assert rejection("POST", path, others) == (404, Reason.UNKNOWN_PATH)

    def test_takes_a_form_for_transcriptions_and_translations_alone(self) -> None:
        forms = {p for p in DEFAULT_INFERENCE_PATHS if route("POST", p).kind == "inference_form"}

        assert forms == {"/v1/audio/transcriptions", "/v1/audio/translations"}

    @pytest.mark.parametrize(
        "method", ["GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "", "post"]
    )
    def test_takes_post_only(self, method: str) -> None:
        assert rejection(method, "/v1/completions") == (405, Reason.METHOD_NOT_ALLOWED)

    @pytest.mark.parametrize("query", ["?", "?a=b", "?x=/../..", "?a#b", "??", "?%zz"])
    def test_does_not_mind_a_query(self, query: str) -> None:
        assert route("POST", f"/v1/completions{query}").path == "/v1/completions"

    @pytest.mark.parametrize(
        "path", ["/v1/comple%74ions", "/%76%31/completions", "/v1/%63ompletions?x=%2F"]
    )
    def test_is_compared_decoded_once_as_the_engine_does(self, path: str) -> None:
        assert unquote(path.partition("?")[0]) == "/v1/completions"
        assert route("POST", path).path == "/v1/completions"

    def test_passes_by_the_configured_list_alone(self) -> None:
        table = RouteTable(["/v2/embed", "/v1/audio/translations"])

        assert route("POST", "/v2/embed", table).kind == RouteKind.INFERENCE_JSON
        assert route("POST", "/v1/audio/translations", table).kind == RouteKind.INFERENCE_FORM
        assert rejection("POST", "/v1/completions", table) == (404, Reason.UNKNOWN_PATH)

    @pytest.mark.parametrize(
        "path",
        ["", "/", "v1/x", "/v1/x/", "/v1//x", "/a/../b", "/v1/%78", "/x?y", "/x y\n", "/v1/*"],
    )
    def test_list_takes_normal_paths_only(self, path: str) -> None:
        with pytest.raises(ValueError, match="normal form"):
            RouteTable([path])

    @pytest.mark.parametrize(
        "path",
        [
            *("/v1/models", "/v1/models/x", "/v1/adapters", "/v1/adapters/x"),
            *("/health", "/ping", "/version", "/version/x"),
            *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
        ],
    )
    def test_list_cannot_take_what_we_answer(self, path: str) -> None:
        with pytest.raises(ValueError, match="answered by this service"):
            RouteTable([path])


class TestUnknownPath:
    @pytest.mark.parametrize(
        "path",
        [
            *(
                "/v1/load_lora_adapter",
                "/v1/unload_lora_adapter",
                "/metrics",
                "/metrics/",
                "/sleep",
            ),
            *("/wake_up", "/collective_rpc", "/health/", "/load", "/version/", "/docs", "/ping/x"),
            *("/v1/realtime", "/abort_requests", "/inference/v1/abort_requests", "/is_sleeping"),
            *("/openapi.json", "/invocations", "/server_info", "/reset_prefix_cache", "/pause"),
            *("", "/", "*", "v1/completions", "http://x/v1/completions", "//x/v1/completions"),
            "/v1/chat/completions/../../load_lora_adapter",
            "/v1/load_lora_adapter/../completions",
            "/metrics/../v1/completions",
            "/metrics/..%2fv1/completions",
            "/metrics/%2e%2e/v1/completions",
            "/metrics/%252e%252e/v1/completions",
            "/v1/./completions",
            "/v1//completions",
            "//v1/completions",
            "/v1/completions/",
            "/v1/completions/.",
            "/v1/completions/..",
            "/v1%2Fcompletions",
            "/v1/chat%2fcompletions",
            "/v1/responses%2Fresp_1",
            "/v1%2fmodels",
            "/%2fhealth",
            "/v1/completions;x",
            "/v1/completions;/../../metrics",
            "/v1/completions%00",
            "/v1/completions\x00",
            "/v1/completions%0a",
            "/v1/completions\n",
            "/v1/completions#x",
            "/metrics#/v1/completions",
            "/v1/completions%23",
            "/v1/completions%3f",
            "/v1%5ccompletions",
            "/v1\\completions",
            "/v1/comple%2574ions",
            "/v1/completions%",
            "/v1/completions%2",
            "/v1/completions%zz",
            "/v1/completions%ff",
            "/v1/completions\udcff",
            "/v1/completions%\udcff",
            "/V1/completions",
            "/v1/completions ",
            "/v1/completions\u200b",
        ],
    )
    @pytest.mark.parametrize("method", ["POST", "GET", "OPTIONS"])
    def test_is_not_found_by_any_method(self, method: str, path: str) -> None:
        assert rejection(method, path) == (404, Reason.UNKNOWN_PATH)


class TestModels:
    @pytest.mark.parametrize("method", ["GET", "HEAD"])
    def test_are_listed(self, method: str) -> None:
        for path in ("/v1/models?x=1", "/v1/models/", "/v1/models/?x=1", "/v1/model%73"):
            assert route(method, path) == Route(RouteKind.LIST_MODELS, "/v1/models")

    @pytest.mark.parametrize("method", ["GET", "HEAD"])
    @pytest.mark.parametrize(
        ("path", "model"),
        [
            ("/v1/models/a", "a"),
            ("/v1/models/org/name", "org/name"),
            ("/v1/models/org%2Fname", "org/name"),
            ("/v1/models/m%C3%BCnchen", "münchen"),
            ("/v1/models/a;b:c@d", "a;b:c@d"),
            ("/v1/mod%65ls/org%2fname%2Fv1", "org/name/v1"),
        ],
    )
    def test_are_found_by_id(self, method: str, path: str, model: str) -> None:
        found = route(method, path)

        assert (found.kind, found.resource) == (RouteKind.GET_MODEL, model)

    @given(st.text(min_size=1))
    def test_are_found_by_every_id_that_has_one_reading(self, model: str) -> None:
        try:
            path = f"/v1/models/{quote(model, safe='')}"
        except UnicodeEncodeError:  # a lone surrogate has no escaped form
            return
        found = TABLE.match("GET", path)

        assert isinstance(found, Rejection) or found.resource == model

    @pytest.mark.parametrize("path", ["/v1/models", "/v1/models/", "/v1/models/a%2Fb"])
    @pytest.mark.parametrize("method", ["POST", "DELETE", "OPTIONS"])
    def test_are_only_read(self, method: str, path: str) -> None:
        assert rejection(method, path) == (405, Reason.METHOD_NOT_ALLOWED)

    @pytest.mark.parametrize(
        "path",
        [
            *("/v1/models//", "/v1/models//a", "/v1/models/..", "/v1/modelsx", "/v1/models/%2F"),
            *("/v1/models/..%2fmetrics", "/v1/models/a%2F%2e%2E%2fb", "/v1/models/a%2F%2Fb"),
            *("/v1/models/%252e%252e%252fmetrics", "/v1/models/..%5cmetrics", "/v1/models/a%2f"),
        ],
    )
    def test_have_no_other_paths(self, path: str) -> None:
        assert rejection("GET", path) == (404, Reason.UNKNOWN_PATH)


class TestAboutUs:
    @pytest.mark.parametrize("method", ["GET", "HEAD"])
    @pytest.mark.parametrize(
        ("path", "kind"),
        [
            ("/health", RouteKind.HEALTH),
            ("/ping", RouteKind.HEALTH),
            ("/version", RouteKind.VERSION),
        ],
    )
    def test_is_answered(self, method: str, path: str, kind: RouteKind) -> None:
        assert route(method, path) == Route(kind, path)
        assert route(method, f"{path}?x=1") == Route(kind, path)

    @pytest.mark.parametrize("path", ["/health", "/ping", "/version"])
    def test_is_only_read(self, path: str) -> None:
        assert rejection("POST", path) == (405, Reason.METHOD_NOT_ALLOWED)


class TestStoredResponse:
    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("GET", "/v1/responses/resp_1"),
            ("GET", "/v1/responses/resp_1?stream=true"),
            ("HEAD", "/v1/responses/resp_1"),
            ("DELETE", "/v1/responses/resp_1"),
            ("POST", "/v1/responses/resp_1/cancel"),
            ("GET", "/v1/responses/resp_1/input_items"),
        ],
    )
    def test_is_known_by_its_id(self, method: str, path: str) -> None:
        found = route(method, path)

        assert (found.kind, found.resource) == (RouteKind.STORED_RESPONSE, "resp_1")
        assert found.path == path.partition("?")[0]

    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("POST", "/v1/responses/resp_1"),
            ("GET", "/v1/responses/resp_1/cancel"),
            ("POST", "/v1/responses/resp_1/input_items"),
            ("GET", "/v1/responses"),
        ],
    )
    def test_has_its_methods_only(self, method: str, path: str) -> None:
        assert rejection(method, path) == (405, Reason.METHOD_NOT_ALLOWED)

    @pytest.mark.parametrize(
        "path", ["/v1/responses/", "/v1/responses/a/b", "/v1/responses/a/b/cancel"]
    )
    def test_has_no_other_paths(self, path: str) -> None:
        assert rejection("GET", path) == (404, Reason.UNKNOWN_PATH)

    def test_is_unknown_where_responses_are_not_listed(self) -> None:
        table = RouteTable(["/v1/completions"])

        assert rejection("GET", "/v1/responses/resp_1", table) == (404, Reason.UNKNOWN_PATH)


class TestNormalForm:
    @given(hostile_paths | st.text().map("/".__add__) | st.text())
    def test_of_a_normal_path_is_itself(self, path: str) -> None:
        normal = normalize_path(path)

        assert normal is None or normalize_path(normal) == normal

    @given(hostile_paths | st.text().map("/".__add__))
    def test_is_what_the_engines_server_compares(self, path: str) -> None:
        """uvicorn unquotes the target up to its query, once, and repairs nothing."""
        normal = normalize_path(path)

        assert normal is None or normal == unquote(path.partition("?")[0])

    @given(listed_paths, st.data())
    def test_of_a_listed_path_survives_any_percent_encoding(
        self, path: str, data: st.DataObject
    ) -> None:
        is_encoded = data.draw(st.lists(st.booleans(), min_size=len(path), max_size=len(path)))
        written = "/" + "".join(
            f"%{ord(c):02X}" if encode and c != "/" else c
            for c, encode in zip(path[1:], is_encoded, strict=False)
        )

        assert route("POST", written).path == path

    @given(st.sampled_from(["GET", "POST", "DELETE"]), hostile_paths)
    def test_is_listed_wherever_a_request_passes(self, method: str, path: str) -> None:
        found = TABLE.match(method, path)
        if isinstance(found, Rejection):
            return

        assert ".." not in found.path.split("/")
        match found.kind:
            case RouteKind.INFERENCE_JSON | RouteKind.INFERENCE_FORM:
                assert found.path in DEFAULT_INFERENCE_PATHS
            case RouteKind.LIST_MODELS | RouteKind.GET_MODEL:
                assert found.path.startswith("/v1/models")
            case RouteKind.HEALTH | RouteKind.VERSION:
                assert found.path in ("/health", "/ping", "/version")
            case RouteKind.STORED_RESPONSE:
                assert found.path.startswith("/v1/responses/")

    def test_is_the_defaults_own(self) -> None:
        assert [normalize_path(path) for path in DEFAULT_INFERENCE_PATHS] == list(
            DEFAULT_INFERENCE_PATHS
        )


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("/v1/completions", "/v1/completions"),
        ("/v1/responses", "/v1/responses"),
        ("/v1/responses/resp_1", "/v1/responses/{id}"),
        ("/v1/responses/resp_1/cancel", "/v1/responses/{id}/cancel"),
        ("", ""),
    ],
)
def test_paths_are_counted_by_what_clients_did_not_choose(path: str, label: str) -> None:
    assert path_label(path) == label


class TestUntoldPath:
    @pytest.mark.parametrize("content_type", ["", "application/json", "text/plain", "multipart"])
    def test_is_taken_for_an_inference_request_by_its_body(self, content_type: str) -> None:
        assert match_without_path("POST", content_type) == Route(RouteKind.INFERENCE_JSON, "")

    @pytest.mark.parametrize(
        "content_type", ["multipart/form-data; boundary=x", " Multipart/Form-Data; boundary=x"]
    )
    def test_of_a_form_is_one_that_takes_forms(self, content_type: str) -> None:
        assert match_without_path("POST", content_type) == Route(RouteKind.INFERENCE_FORM, "")

    @pytest.mark.parametrize("method", ["GET", "DELETE", "CONNECT", ""])
    def test_takes_post_only(self, method: str) -> None:
        found = match_without_path(method, "application/json")

        assert isinstance(found, Rejection)
        assert (found.status, found.allowed_methods) == (405, ("POST",))
