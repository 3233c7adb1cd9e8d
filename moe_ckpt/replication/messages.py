"""Messages between daemons, workers and checkpoint servers, in MessagePack form.

Owns: the kinds of messages, and strict reading. Must not: send messages, or execute the
requests in messages.

    worker -> its daemon   Copy, Persist             answer: Copied
                           Forget, UsePeers          no answer
    daemon -> a client     Challenge                 answer: Hello
                           then Welcome, or Refused
    daemon -> a daemon     Put, Drop                 answers: Done, Refused
    worker -> a daemon     ListKeys, Get, Clear      answers: Keys, a blob, Done,
                                                     Refused

    a blob with a small header and no payload        Found ->
    any other blob         Found ->   <- Done   header, payload, Sent ->
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
    """Host name or IP address."""

    port: int
    """TCP port."""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Return the address from its `str` form.

    Raises:
        ValueError: The text does not end with a port number.
    """
    host, _, port = text.rpartition(":")
    return Address(host=host, port=int(port))


class Message(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Root of all messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """The run of a process, and the secret that all processes of the run share."""

    run_id: str
    """The run of the process."""

    token: str = field(repr=False)
    """The secret. No process ever sends the token: see `admission`."""

    tls: TlsEnds | None = field(default=None, repr=False, compare=False)
    """TLS contexts for connections to other nodes. None: connections without TLS."""


class Challenge(Message, frozen=True, kw_only=True):
    """A server's first message."""

    nonce: str
    """Random nonce, in hex."""


class Hello(Message, frozen=True, kw_only=True):
    """A client's first message."""

    run_id: str
    """The client's run."""

    nonce: str
    """The client's own random nonce, in hex."""

    proof: str
    """Proof that the client has the run's token, in hex: see `admission`."""


class Welcome(Message, frozen=True, kw_only=True):
    """Admission of a client."""

    proof: str
    """Proof that the server has the run's token, too, in hex."""


class Put(Message, frozen=True, kw_only=True):
    """Request to store a copy for a rank. The blob follows."""

    owner_rank: Count
    """Global rank that owns the blob."""

    key: str
    """Key of the blob."""


class Drop(Message, frozen=True, kw_only=True):
    """Request to delete copies of a rank's blobs."""

    owner_rank: Count
    """Global rank that owns the blobs."""

    keys: tuple[str, ...]
    """Keys of the blobs."""


class Clear(Message, frozen=True, kw_only=True):
    """Request to delete all copies of a rank's blobs."""

    owner_rank: Count
    """Global rank that owns the blobs."""


class ListKeys(Message, frozen=True, kw_only=True):
    """Request for the keys of all blobs that the server has of a rank.

    The server lists the copies that it holds for the rank. For the server's own rank,
    the server lists the blobs that the rank has published.
    """

    owner_rank: Count
    """Global rank that owns the blobs."""


class Get(Message, frozen=True, kw_only=True):
    """Request for one blob of a rank.

    The server has the blob among its copies or, for its own rank, among its own blobs.
    """

    owner_rank: Count
    """Global rank that owns the blob."""

    key: str
    """Key of the blob."""


class Keys(Message, frozen=True, kw_only=True):
    """Answer to `ListKeys`."""

    keys: tuple[str, ...]
    """Keys of the blobs, sorted."""


class Found(Message, frozen=True, kw_only=True):
    """First message of a blob.

    Parts of the blob that are not in this message follow after the receiver's `Done`.
    """

    header: bytes | None = None
    """The header. None: the header is too large for a message and follows."""

    header_bytes: Count = 0
    """Size of a header that follows, in bytes; otherwise 0."""

    payload_bytes: Count | None
    """Size of the payload, which follows, in bytes. None: the blob has no payload."""


class Sent(Message, frozen=True, kw_only=True):
    """End of a blob's bytes."""

    header_xxh3: int
    """XXH3 of the header that followed `Found`; of no bytes if none followed."""

    payload_xxh3: int
    """XXH3 of the payload."""


class Done(Message, frozen=True, kw_only=True):
    """Confirmation: a request was executed, or a receiver waits for a blob's bytes.

    Only a checkpoint server that has computed a state sets the times.
    """

    busy_us: Count = 0
    """Time of the server's work, in microseconds."""

    after_us: Count = 0
    """Time from the payload's last byte to the end of the work, in microseconds."""


class Refused(Message, frozen=True, kw_only=True):
    """Refusal of a request."""

    reason: str
    """Reason of the refusal."""

    garbled: bool
    """Whether bytes arrived damaged, so that another attempt may succeed."""


class Copy(Message, frozen=True, kw_only=True):
    """Request to copy blobs of the worker's rank to all peers."""

    number: Count
    """Number of the request, which the answer repeats."""

    keys: tuple[str, ...]
    """Keys of the blobs. Empty: the answer comes once all earlier copies have ended."""


class Persist(Message, frozen=True, kw_only=True):
    """Request to write blobs of the worker's rank to a folder on disk."""

    number: Count
    """Number of the request, which the answer repeats."""

    keys: tuple[str, ...]
    """Keys of the blobs.

    Empty: the answer comes once all earlier writes have ended, and the cap on disk
    traffic no longer delays these writes.
    """

    stale: tuple[str, ...]
    """Keys of the blobs on disk to delete before the write."""

    path: str
    """Folder on disk."""

    limit_bytes: Count | None
    """Most bytes that the folder may hold. None: no limit."""


class Copied(Message, frozen=True, kw_only=True):
    """Answer to `Copy` or `Persist`."""

    number: Count
    """Number of the request."""

    failure: str | None
    """Reason of a failure. None: the request was executed in full."""

    busy_us: Count = 0
    """Longest work of a checkpoint server among the peers, in microseconds."""

    after_us: Count = 0
    """Longest time of such a server from the last byte to the end, in microseconds."""


class Forget(Message, frozen=True, kw_only=True):
    """Request to make all peers delete their copies of blobs."""

    keys: tuple[str, ...]
    """Keys of the blobs."""


class UsePeers(Message, frozen=True, kw_only=True):
    """Request to copy to these peers from now on."""

    addresses: tuple[str, ...]
    """Addresses of the peers' servers, in `str` form."""


# created at import: two threads that decoded a type for the first time at the same
# moment crashed a daemon inside msgspec 0.22
_NAMED = msgspec.msgpack.Decoder(dict[str, Raw])
_KINDS = {kind.__name__: kind for kind in Message.__subclasses__()}
_DECODERS = {name: msgspec.msgpack.Decoder(kind) for name, kind in _KINDS.items()}


def message_to_bytes(message: Message) -> bytes:
    """Return the MessagePack form of a message.

    The form is a map with one entry, from the name of the message's kind to the
    message's fields.
    """
    # not JSON: JSON would hold headers of blobs in base 64, and each iteration sends a
    # header
    return msgspec.msgpack.encode({type(message).__name__: message})


def message_from_bytes(data: bytes | bytearray) -> Message:
    """Return the message that `message_to_bytes` has encoded.

    Raises:
        ValueError: The bytes are anything else.
    """
    try:
        ((name, content),) = _NAMED.decode(data).items()
        return _DECODERS[name].decode(content)
    except (ValueError, KeyError, RecursionError) as error:
        raise ValueError(f"not a message: {error!r}: {reprlib.repr(data)}") from error
