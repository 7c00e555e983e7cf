from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PeerMessage(_message.Message):
    __slots__ = ("hello", "entries", "acknowledgement", "picks", "adapters", "proof", "mac")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGEMENT_FIELD_NUMBER: _ClassVar[int]
    PICKS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    entries: Entries
    acknowledgement: Acknowledgement
    picks: Picks
    adapters: Adapters
    proof: Proof
    mac: bytes
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., entries: _Optional[_Union[Entries, _Mapping]] = ..., acknowledgement: _Optional[_Union[Acknowledgement, _Mapping]] = ..., picks: _Optional[_Union[Picks, _Mapping]] = ..., adapters: _Optional[_Union[Adapters, _Mapping]] = ..., proof: _Optional[_Union[Proof, _Mapping]] = ..., mac: _Optional[bytes] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("router_id", "nonce", "believes_callers")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    BELIEVES_CALLERS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    nonce: bytes
    believes_callers: bool
    def __init__(self, router_id: _Optional[str] = ..., nonce: _Optional[bytes] = ..., believes_callers: _Optional[bool] = ...) -> None: ...

class Proof(_message.Message):
    __slots__ = ("mac",)
    MAC_FIELD_NUMBER: _ClassVar[int]
    mac: bytes
    def __init__(self, mac: _Optional[bytes] = ...) -> None: ...

class Entries(_message.Message):
    __slots__ = ("log_entries", "num_losses")
    LOG_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    NUM_LOSSES_FIELD_NUMBER: _ClassVar[int]
    log_entries: _containers.RepeatedScalarFieldContainer[bytes]
    num_losses: int
    def __init__(self, log_entries: _Optional[_Iterable[bytes]] = ..., num_losses: _Optional[int] = ...) -> None: ...

class Acknowledgement(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Picks(_message.Message):
    __slots__ = ("is_first", "started", "ended", "waiting")
    IS_FIRST_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    is_first: bool
    started: _containers.RepeatedCompositeFieldContainer[StartedPick]
    ended: _containers.RepeatedCompositeFieldContainer[EndedPick]
    waiting: Waiting
    def __init__(self, is_first: _Optional[bool] = ..., started: _Optional[_Iterable[_Union[StartedPick, _Mapping]]] = ..., ended: _Optional[_Iterable[_Union[EndedPick, _Mapping]]] = ..., waiting: _Optional[_Union[Waiting, _Mapping]] = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ("addresses", "slots", "ahead")
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    slots: _containers.RepeatedCompositeFieldContainer[KeptSlot]
    ahead: _containers.RepeatedCompositeFieldContainer[WaitingAhead]
    def __init__(self, addresses: _Optional[_Iterable[str]] = ..., slots: _Optional[_Iterable[_Union[KeptSlot, _Mapping]]] = ..., ahead: _Optional[_Iterable[_Union[WaitingAhead, _Mapping]]] = ...) -> None: ...

class WaitingAhead(_message.Message):
    __slots__ = ("priority", "age_ms", "left_ms", "reach")
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    REACH_FIELD_NUMBER: _ClassVar[int]
    priority: int
    age_ms: int
    left_ms: int
    reach: bytes
    def __init__(self, priority: _Optional[int] = ..., age_ms: _Optional[int] = ..., left_ms: _Optional[int] = ..., reach: _Optional[bytes] = ...) -> None: ...

class KeptSlot(_message.Message):
    __slots__ = ("adapter", "address", "leaving", "priority", "flow", "left_ms")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    FLOW_FIELD_NUMBER: _ClassVar[int]
    LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    address: str
    leaving: str
    priority: int
    flow: str
    left_ms: int
    def __init__(self, adapter: _Optional[str] = ..., address: _Optional[str] = ..., leaving: _Optional[str] = ..., priority: _Optional[int] = ..., flow: _Optional[str] = ..., left_ms: _Optional[int] = ...) -> None: ...

class StartedPick(_message.Message):
    __slots__ = ("number", "address", "adapter", "body_bytes", "age_ms", "flow", "priority", "tokens", "num_sequences")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    BODY_BYTES_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    FLOW_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    number: int
    address: str
    adapter: str
    body_bytes: int
    age_ms: int
    flow: str
    priority: int
    tokens: float
    num_sequences: int
    def __init__(self, number: _Optional[int] = ..., address: _Optional[str] = ..., adapter: _Optional[str] = ..., body_bytes: _Optional[int] = ..., age_ms: _Optional[int] = ..., flow: _Optional[str] = ..., priority: _Optional[int] = ..., tokens: _Optional[float] = ..., num_sequences: _Optional[int] = ...) -> None: ...

class EndedPick(_message.Message):
    __slots__ = ("number", "has_run")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    HAS_RUN_FIELD_NUMBER: _ClassVar[int]
    number: int
    has_run: bool
    def __init__(self, number: _Optional[int] = ..., has_run: _Optional[bool] = ...) -> None: ...

class Adapters(_message.Message):
    __slots__ = ("loads", "declared", "wanted", "failed", "changed", "leaving")
    LOADS_FIELD_NUMBER: _ClassVar[int]
    DECLARED_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    loads: bool
    declared: int
    wanted: _containers.RepeatedScalarFieldContainer[str]
    failed: _containers.RepeatedCompositeFieldContainer[FailedAdapter]
    changed: _containers.RepeatedScalarFieldContainer[str]
    leaving: _containers.RepeatedCompositeFieldContainer[AdapterPlace]
    def __init__(self, loads: _Optional[bool] = ..., declared: _Optional[int] = ..., wanted: _Optional[_Iterable[str]] = ..., failed: _Optional[_Iterable[_Union[FailedAdapter, _Mapping]]] = ..., changed: _Optional[_Iterable[str]] = ..., leaving: _Optional[_Iterable[_Union[AdapterPlace, _Mapping]]] = ...) -> None: ...

class AdapterPlace(_message.Message):
    __slots__ = ("address", "name")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    address: str
    name: str
    def __init__(self, address: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class FailedAdapter(_message.Message):
    __slots__ = ("name", "reason", "message")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    name: str
    reason: str
    message: str
    def __init__(self, name: _Optional[str] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...
