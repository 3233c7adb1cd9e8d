"""The messages between daemons and workers: values, and their form as MessagePack.

Owns: the kinds of messages, and strict reading. Must not: send messages, or execute
their requests.

    worker -> its daemon   Copy, Forget, UsePeers, Persist        answers: Copied
    a daemon -> a client    Challenge                              answer: Hello; then Welcome, Refused
    daemon -> a daemon      Put, Drop, Clear                       answers: Done, Refused
    worker -> a daemon      ListKeys, Get                          answers: Keys, a blob, Refused
    a blob                  Found ->                              a small header, and no payload
                            Found ->   <- Done   header, payload, Sent ->
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass, field

import msgspec
from msgspec import Raw, Struct

from moe_ckpt.exact_json import Count
from moe_ckpt.replication.tls import TlsEnds


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


class Message(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Root of all messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """The run of a process, and the secret that all processes of the run share.

    The secret is never sent: see `admission`. `tls`: connections to other nodes use
    TLS.
    """

    run_id: str
    token: str = field(repr=False)
    tls: TlsEnds | None = field(default=None, repr=False, compare=False)


class Challenge(Message, frozen=True, kw_only=True):
    """A server's first message: a random nonce, in hex."""

    nonce: str


class Hello(Message, frozen=True, kw_only=True):
    """A client's first message: its run, a nonce of its own, and the proof that it has
    the run's token.
    """

    run_id: str
    nonce: str
    proof: str


class Welcome(Message, frozen=True, kw_only=True):
    """The client is admitted; `proof`: the server has the token, too."""

    proof: str


class Put(Message, frozen=True, kw_only=True):
    """Store a copy for a rank; the blob follows."""

    owner_rank: Count
    key: str


class Drop(Message, frozen=True, kw_only=True):
    """Drop these copies."""

    owner_rank: Count
    keys: tuple[str, ...]


class Clear(Message, frozen=True, kw_only=True):
    """Drop all copies of a rank's blobs."""

    owner_rank: Count


class ListKeys(Message, frozen=True, kw_only=True):
    """List the copies of a rank's blobs; for the server's own rank, its published
    blobs.
    """

    owner_rank: Count


class Get(Message, frozen=True, kw_only=True):
    """Send a blob of a rank, from the copies or from the own blobs."""

    owner_rank: Count
    key: str


class Keys(Message, frozen=True, kw_only=True):
    """The answer to ListKeys."""

    keys: tuple[str, ...]


class Found(Message, frozen=True, kw_only=True):
    """A blob. What the message does not hold follows after the other side's Done."""

    header: bytes | None = None
    """The header; None: a header that is too large for a message follows."""

    header_bytes: Count = 0
    """The size of a header that follows."""

    payload_bytes: Count | None
    """The size of the payload, which follows; None: the blob has no payload."""


class Sent(Message, frozen=True, kw_only=True):
    """All bytes of a blob have been sent; these are their XXH3 hashes."""

    header_xxh3: int
    payload_xxh3: int


class Done(Message, frozen=True, kw_only=True):
    """The request has been executed.

    By a checkpoint server: in `busy_us` microseconds of work, of which `after_us` came
    after the last byte.
    """

    busy_us: Count = 0
    after_us: Count = 0


class Refused(Message, frozen=True, kw_only=True):
    """The request is refused. `garbled`: its bytes arrived damaged."""

    reason: str
    garbled: bool


class Copy(Message, frozen=True, kw_only=True):
    """Copy these blobs of the worker's rank to all peers; the answer has the same
    number.
    """

    number: Count
    keys: tuple[str, ...]


class Persist(Message, frozen=True, kw_only=True):
    """Copy these blobs to a folder on disk, and delete `stale` there; the answer has
    the same number.
    """

    number: Count
    keys: tuple[str, ...]
    stale: tuple[str, ...]
    path: str
    limit_bytes: Count | None


class Copied(Message, frozen=True, kw_only=True):
    """All peers have confirmed the copies, or the blobs are on disk; else the reason of
    the failure.

    The slowest checkpoint server worked for `busy_us` microseconds, and `after_us`
    after the last byte.
    """

    number: Count
    failure: str | None
    busy_us: Count = 0
    after_us: Count = 0


class Forget(Message, frozen=True, kw_only=True):
    """Let all peers drop their copies of these blobs."""

    keys: tuple[str, ...]


class UsePeers(Message, frozen=True, kw_only=True):
    """Copy to these addresses from now on."""

    addresses: tuple[str, ...]


# made at import: two threads that first decoded a type at the same time crashed a
# daemon inside msgspec 0.22
_NAMED = msgspec.msgpack.Decoder(dict[str, Raw])
_KINDS = {kind.__name__: kind for kind in Message.__subclasses__()}
_DECODERS = {name: msgspec.msgpack.Decoder(kind) for name, kind in _KINDS.items()}


def message_to_bytes(message: Message) -> bytes:
    """Return a map with one entry: the name of the message's kind, with the message's
    fields.
    """
    # MessagePack: JSON would have headers of blobs in base 64, and each iteration sends
    # one
    return msgspec.msgpack.encode({type(message).__name__: message})


def message_from_bytes(data: bytes | bytearray) -> Message:
    """Return the message that `message_to_bytes` wrote. Raises ValueError if the bytes
    are anything else.
    """
    try:
        ((name, content),) = _NAMED.decode(data).items()
        return _DECODERS[name].decode(content)
    except (ValueError, KeyError, RecursionError) as error:
        raise ValueError(f"not a message: {error!r}: {reprlib.repr(data)}") from error
