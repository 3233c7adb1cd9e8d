"""The messages between daemons and workers: values, and their form as JSON.

Owns: the kinds of messages, and strict reading. Must not: send messages, or execute their requests.

    worker -> its daemon   Copy, Forget, UsePeers, Persist        answers: Copied
    a daemon -> a client    Challenge                              answer: Hello; then Welcome, Refused
    daemon -> a daemon      Put, Drop, Clear                       answers: Done, Refused
    worker -> a daemon      ListKeys, Get                          answers: Keys, a blob, Refused
    a blob                  Found ->   <- Done   header, payload, Sent ->
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

from moe_ckpt.replication.tls import TlsEnds

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """The address of a daemon's server."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Return the address from its `str` form. Raises ValueError."""
    host, _, port = text.rpartition(":")
    return Address(host=host, port=int(port))


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """Root of all messages. Fields are of the types that `_READERS` names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """The run of a process, and the secret that all processes of the run share.

    The secret is never sent: see `admission`. `tls`: connections to other nodes use TLS.
    """

    run_id: str
    token: str = field(repr=False)
    tls: TlsEnds | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Challenge(Message):
    """A server's first message: a random nonce, in hex."""

    nonce: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello(Message):
    """A client's first message: its run, a nonce of its own, and the proof that it has the run's token."""

    run_id: str
    nonce: str
    proof: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Welcome(Message):
    """The client is admitted; `proof`: the server has the token, too."""

    proof: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Put(Message):
    """Store a copy for a rank; the blob follows."""

    owner_rank: int
    key: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Drop(Message):
    """Drop these copies."""

    owner_rank: int
    keys: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Clear(Message):
    """Drop all copies of a rank's blobs."""

    owner_rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ListKeys(Message):
    """List the copies of a rank's blobs; for the server's own rank, its published blobs."""

    owner_rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Get(Message):
    """Send a blob of a rank, from the copies or from the own blobs."""

    owner_rank: int
    key: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Keys(Message):
    """The answer to ListKeys."""

    keys: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Found(Message):
    """A blob of this size, whose bytes follow after the other side's Done. None: the blob has no payload."""

    header_bytes: int
    payload_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent(Message):
    """All bytes of a blob have been sent; these are their XXH3 hashes."""

    header_xxh3: int
    payload_xxh3: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Done(Message):
    """The request has been executed.

    By a checkpoint server: in `busy_us` microseconds of work, of which `after_us` came after the last byte.
    """

    busy_us: int = 0
    after_us: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused(Message):
    """The request is refused. `garbled`: its bytes arrived damaged."""

    reason: str
    garbled: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy(Message):
    """Copy these blobs of the worker's rank to all peers; the answer has the same number."""

    number: int
    keys: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Persist(Message):
    """Copy these blobs to a folder on disk, and delete `stale` there; the answer has the same number."""

    number: int
    keys: tuple[str, ...]
    stale: tuple[str, ...]
    path: str
    limit_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Copied(Message):
    """All peers have confirmed the copies, or the blobs are on disk; else the reason of the failure.

    The slowest checkpoint server worked for `busy_us` microseconds, and `after_us` after the last byte.
    """

    number: int
    failure: str | None
    busy_us: int = 0
    after_us: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Forget(Message):
    """Let all peers drop their copies of these blobs."""

    keys: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class UsePeers(Message):
    """Copy to these addresses from now on."""

    addresses: tuple[str, ...]


_KINDS: dict[str, type[Message]] = {
    kind.__name__: kind
    for kind in (
        *(Challenge, Hello, Welcome, Put, Drop, Clear, ListKeys, Get, Keys, Found, Sent, Done, Refused),
        *(Copy, Copied, Forget, UsePeers, Persist),
    )
}


def message_to_json(message: Message) -> bytes:
    """Return a message as a JSON object with one field: its kind, with its fields."""
    return json.dumps({type(message).__name__: asdict(message)}, separators=(",", ":")).encode()


def message_from_json(data: bytes) -> Message:
    """Return the message that `message_to_json` wrote. Raises ValueError if the bytes are anything else."""
    try:
        ((name, content),) = _typed(dict, json.loads(data)).items()
        return _read(_KINDS[name], _typed(dict, content))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"not a message: {error!r}: {reprlib.repr(data)}") from error


def _read(kind: type[Message], content: dict[str, object]) -> Message:
    readers = {field.name: _READERS[str(field.type)] for field in fields(kind)}
    if content.keys() != readers.keys():
        raise ValueError(f"got fields {reprlib.repr(sorted(content))}, wanted {sorted(readers)}")
    return kind(**{name: reader(content[name]) for name, reader in readers.items()})


def _typed(kind: type[T], value: object) -> T:
    if type(value) is not kind:
        raise TypeError(f"got {reprlib.repr(value)}, wanted {kind.__name__}")
    return value


def _flag(value: object) -> bool:
    return _typed(bool, value)


def _text(value: object) -> str:
    return _typed(str, value)


def _count(value: object) -> int:
    if not 0 <= _typed(int, value) < 2**64:
        raise ValueError(f"got {reprlib.repr(value)}, wanted a number of 64 bits")
    return _typed(int, value)


def _texts(value: object) -> tuple[str, ...]:
    return tuple(_text(item) for item in _typed(list, value))


def _or_none(reader: Callable[[object], T]) -> Callable[[object], T | None]:
    return lambda value: None if value is None else reader(value)


_READERS: dict[str, Callable[[object], Any]] = {
    "bool": _flag,
    "int": _count,
    "str": _text,
    "int | None": _or_none(_count),
    "str | None": _or_none(_text),
    "tuple[str, ...]": _texts,
}
