from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PeerMessage(_message.Message):
    __slots__ = ("hello", "entries", "acknowledgement", "adapters", "proof", "sums", "mac")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGEMENT_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    entries: Entries
    acknowledgement: Acknowledgement
    adapters: Adapters
    proof: Proof
    sums: Sums
    mac: bytes
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., entries: _Optional[_Union[Entries, _Mapping]] = ..., acknowledgement: _Optional[_Union[Acknowledgement, _Mapping]] = ..., adapters: _Optional[_Union[Adapters, _Mapping]] = ..., proof: _Optional[_Union[Proof, _Mapping]] = ..., sums: _Optional[_Union[Sums, _Mapping]] = ..., mac: _Optional[bytes] = ...) -> None: ...

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

class Sums(_message.Message):
    __slots__ = ("is_whole", "first", "names", "places", "changes", "waiting")
    IS_WHOLE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    is_whole: bool
    first: int
    names: _containers.RepeatedScalarFieldContainer[str]
    places: _containers.RepeatedScalarFieldContainer[int]
    changes: _containers.RepeatedScalarFieldContainer[int]
    waiting: Waiting
    def __init__(self, is_whole: _Optional[bool] = ..., first: _Optional[int] = ..., names: _Optional[_Iterable[str]] = ..., places: _Optional[_Iterable[int]] = ..., changes: _Optional[_Iterable[int]] = ..., waiting: _Optional[_Union[Waiting, _Mapping]] = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ("addresses", "ahead")
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    ahead: _containers.RepeatedCompositeFieldContainer[WaitingAhead]
    def __init__(self, addresses: _Optional[_Iterable[str]] = ..., ahead: _Optional[_Iterable[_Union[WaitingAhead, _Mapping]]] = ...) -> None: ...

class WaitingAhead(_message.Message):
    __slots__ = ("priority", "left_ms", "reach")
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    REACH_FIELD_NUMBER: _ClassVar[int]
    priority: int
    left_ms: int
    reach: bytes
    def __init__(self, priority: _Optional[int] = ..., left_ms: _Optional[int] = ..., reach: _Optional[bytes] = ...) -> None: ...

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
