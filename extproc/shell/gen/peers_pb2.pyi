from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PeerMessage(_message.Message):
    __slots__ = ("hello", "entries", "acknowledgement")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGEMENT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    entries: Entries
    acknowledgement: Acknowledgement
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., entries: _Optional[_Union[Entries, _Mapping]] = ..., acknowledgement: _Optional[_Union[Acknowledgement, _Mapping]] = ...) -> None: ...

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
