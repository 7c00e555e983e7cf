import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WatchRequest(_message.Message):
    __slots__ = ("models", "endpoint", "only_rejections", "replay_last", "after_sequence", "explain", "outcomes", "after_outcome", "request", "candidates_interval_seconds")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    ONLY_REJECTIONS_FIELD_NUMBER: _ClassVar[int]
    REPLAY_LAST_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    AFTER_OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_INTERVAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedScalarFieldContainer[str]
    endpoint: str
    only_rejections: bool
    replay_last: int
    after_sequence: int
    explain: bool
    outcomes: bool
    after_outcome: int
    request: str
    candidates_interval_seconds: int
    def __init__(self, models: _Optional[_Iterable[str]] = ..., endpoint: _Optional[str] = ..., only_rejections: _Optional[bool] = ..., replay_last: _Optional[int] = ..., after_sequence: _Optional[int] = ..., explain: _Optional[bool] = ..., outcomes: _Optional[bool] = ..., after_outcome: _Optional[int] = ..., request: _Optional[str] = ..., candidates_interval_seconds: _Optional[int] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("sequence", "time", "decision_seconds", "pick", "rejection", "explanation", "last_outcome", "outcome", "shadow")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    DECISION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PICK_FIELD_NUMBER: _ClassVar[int]
    REJECTION_FIELD_NUMBER: _ClassVar[int]
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    LAST_OUTCOME_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    time: _timestamp_pb2.Timestamp
    decision_seconds: float
    pick: Pick
    rejection: Rejection
    explanation: str
    last_outcome: int
    outcome: Outcome
    shadow: Shadow
    def __init__(self, sequence: _Optional[int] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., decision_seconds: _Optional[float] = ..., pick: _Optional[_Union[Pick, _Mapping]] = ..., rejection: _Optional[_Union[Rejection, _Mapping]] = ..., explanation: _Optional[str] = ..., last_outcome: _Optional[int] = ..., outcome: _Optional[_Union[Outcome, _Mapping]] = ..., shadow: _Optional[_Union[Shadow, _Mapping]] = ...) -> None: ...

class Shadow(_message.Message):
    __slots__ = ("policy", "result", "endpoint", "endpoint_name", "error", "harm_seconds", "choose_seconds", "num_asked", "num_agreed")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_NAME_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    HARM_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CHOOSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_ASKED_FIELD_NUMBER: _ClassVar[int]
    NUM_AGREED_FIELD_NUMBER: _ClassVar[int]
    policy: str
    result: str
    endpoint: str
    endpoint_name: str
    error: str
    harm_seconds: float
    choose_seconds: float
    num_asked: int
    num_agreed: int
    def __init__(self, policy: _Optional[str] = ..., result: _Optional[str] = ..., endpoint: _Optional[str] = ..., endpoint_name: _Optional[str] = ..., error: _Optional[str] = ..., harm_seconds: _Optional[float] = ..., choose_seconds: _Optional[float] = ..., num_asked: _Optional[int] = ..., num_agreed: _Optional[int] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("number", "pick_id", "request_id", "model", "outcome", "status", "ttft_seconds", "duration_seconds", "served_by", "served_by_name", "attempts", "body_bytes", "output_tokens")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PICK_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    TTFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DURATION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SERVED_BY_FIELD_NUMBER: _ClassVar[int]
    SERVED_BY_NAME_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    BODY_BYTES_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    number: int
    pick_id: str
    request_id: str
    model: str
    outcome: str
    status: int
    ttft_seconds: float
    duration_seconds: float
    served_by: str
    served_by_name: str
    attempts: int
    body_bytes: int
    output_tokens: float
    def __init__(self, number: _Optional[int] = ..., pick_id: _Optional[str] = ..., request_id: _Optional[str] = ..., model: _Optional[str] = ..., outcome: _Optional[str] = ..., status: _Optional[int] = ..., ttft_seconds: _Optional[float] = ..., duration_seconds: _Optional[float] = ..., served_by: _Optional[str] = ..., served_by_name: _Optional[str] = ..., attempts: _Optional[int] = ..., body_bytes: _Optional[int] = ..., output_tokens: _Optional[float] = ...) -> None: ...

class Pick(_message.Message):
    __slots__ = ("id", "request_id", "model", "adapter", "path", "body_bytes", "endpoints", "policy", "reason", "candidates", "held_seconds", "held_for", "served_model", "tenant", "route", "objective")
    ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    BODY_BYTES_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    HELD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HELD_FOR_FIELD_NUMBER: _ClassVar[int]
    SERVED_MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    OBJECTIVE_FIELD_NUMBER: _ClassVar[int]
    id: str
    request_id: str
    model: str
    adapter: str
    path: str
    body_bytes: int
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    policy: str
    reason: str
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    held_seconds: float
    held_for: str
    served_model: str
    tenant: str
    route: str
    objective: str
    def __init__(self, id: _Optional[str] = ..., request_id: _Optional[str] = ..., model: _Optional[str] = ..., adapter: _Optional[str] = ..., path: _Optional[str] = ..., body_bytes: _Optional[int] = ..., endpoints: _Optional[_Iterable[str]] = ..., policy: _Optional[str] = ..., reason: _Optional[str] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., held_seconds: _Optional[float] = ..., held_for: _Optional[str] = ..., served_model: _Optional[str] = ..., tenant: _Optional[str] = ..., route: _Optional[str] = ..., objective: _Optional[str] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("address", "name", "num_pending", "num_adapter_pending", "num_active_adapters", "loaded", "on_gpu", "known", "kv_usage_ratio", "max_loras")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_PENDING_FIELD_NUMBER: _ClassVar[int]
    NUM_ADAPTER_PENDING_FIELD_NUMBER: _ClassVar[int]
    NUM_ACTIVE_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    ON_GPU_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_RATIO_FIELD_NUMBER: _ClassVar[int]
    MAX_LORAS_FIELD_NUMBER: _ClassVar[int]
    address: str
    name: str
    num_pending: int
    num_adapter_pending: int
    num_active_adapters: int
    loaded: bool
    on_gpu: bool
    known: bool
    kv_usage_ratio: float
    max_loras: int
    def __init__(self, address: _Optional[str] = ..., name: _Optional[str] = ..., num_pending: _Optional[int] = ..., num_adapter_pending: _Optional[int] = ..., num_active_adapters: _Optional[int] = ..., loaded: _Optional[bool] = ..., on_gpu: _Optional[bool] = ..., known: _Optional[bool] = ..., kv_usage_ratio: _Optional[float] = ..., max_loras: _Optional[int] = ...) -> None: ...

class Rejection(_message.Message):
    __slots__ = ("status", "reason", "message", "model", "retry_after_seconds", "request_id", "path", "why")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    status: int
    reason: str
    message: str
    model: str
    retry_after_seconds: int
    request_id: str
    path: str
    why: str
    def __init__(self, status: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., model: _Optional[str] = ..., retry_after_seconds: _Optional[int] = ..., request_id: _Optional[str] = ..., path: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...
