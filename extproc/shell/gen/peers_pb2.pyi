from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PeerMessage(_message.Message):
    __slots__ = ("hello", "entries", "acknowledgement", "picks")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGEMENT_FIELD_NUMBER: _ClassVar[int]
    PICKS_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    entries: Entries
    acknowledgement: Acknowledgement
    picks: Picks
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., entries: _Optional[_Union[Entries, _Mapping]] = ..., acknowledgement: _Optional[_Union[Acknowledgement, _Mapping]] = ..., picks: _Optional[_Union[Picks, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("router_id",)
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    def __init__(self, router_id: _Optional[str] = ...) -> None: ...

class Entries(_message.Message):
    __slots__ = ("log_entries",)
    LOG_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    log_entries: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, log_entries: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Acknowledgement(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Picks(_message.Message):
    __slots__ = ("is_first", "started", "ended")
    IS_FIRST_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    is_first: bool
    started: _containers.RepeatedCompositeFieldContainer[StartedPick]
    ended: _containers.RepeatedCompositeFieldContainer[EndedPick]
    def __init__(self, is_first: _Optional[bool] = ..., started: _Optional[_Iterable[_Union[StartedPick, _Mapping]]] = ..., ended: _Optional[_Iterable[_Union[EndedPick, _Mapping]]] = ...) -> None: ...

class StartedPick(_message.Message):
    __slots__ = ("number", "address", "adapter", "body_bytes", "age_ms")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    BODY_BYTES_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    number: int
    address: str
    adapter: str
    body_bytes: int
    age_ms: int
    def __init__(self, number: _Optional[int] = ..., address: _Optional[str] = ..., adapter: _Optional[str] = ..., body_bytes: _Optional[int] = ..., age_ms: _Optional[int] = ...) -> None: ...

class EndedPick(_message.Message):
    __slots__ = ("number", "has_run")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    HAS_RUN_FIELD_NUMBER: _ClassVar[int]
    number: int
    has_run: bool
    def __init__(self, number: _Optional[int] = ..., has_run: _Optional[bool] = ...) -> None: ...
