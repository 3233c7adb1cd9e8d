"""Reads TCP segments from the frames of a mirror port. Pure.

Frames are Ethernet, with one VLAN tag at most, and IPv4. Checksums are ignored: frames
between hosts on one machine carry none, since network cards would add checksums.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

_IPV4, _VLAN, _TCP = 0x0800, 0x8100, 6
_FIN, _SYN, _RST, _ACK = 0x01, 0x02, 0x04, 0x10
_ETHERNET_BYTES, _LEAST_HEADER_BYTES = 14, 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """One direction of a TCP connection."""

    source: bytes
    """Address of the sender as in the header, 4 bytes."""

    source_port: int
    """Port of the sender."""

    target: bytes
    """Address of the receiver as in the header, 4 bytes."""

    target_port: int
    """Port of the receiver."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TcpSegment:
    """Part of a stream in one frame."""

    stream: Stream
    """Stream that the segment belongs to."""

    sequence: int
    """Sequence number in the header."""

    payload: bytes
    """Bytes of the stream."""

    begins: bool = False
    """Whether the segment begins the stream (SYN)."""

    opens: bool = False
    """Whether this is the first packet of the end that opened the connection (SYN
    without ACK).
    """

    ends: bool = False
    """Whether the segment ends the stream (FIN or RST)."""


def segment_of(frame: bytes) -> TcpSegment | None:
    """Return the TCP segment of a frame.

    None for other frames, fragments, and frames that were cut off.
    """
    packet = _ipv4_packet(frame)
    if packet is None:
        return None
    header_bytes = 4 * (packet[0] & 15)
    tcp = packet[header_bytes:]
    if packet[9] != _TCP or len(tcp) < _LEAST_HEADER_BYTES:
        return None
    source_port, target_port, sequence = struct.unpack_from(">HHI", tcp)
    offset_bytes, flags = 4 * (tcp[12] >> 4), tcp[13]
    if not _LEAST_HEADER_BYTES <= offset_bytes <= len(tcp):
        return None
    return TcpSegment(
        stream=Stream(
            source=packet[12:16],
            source_port=source_port,
            target=packet[16:20],
            target_port=target_port,
        ),
        sequence=sequence,
        payload=tcp[offset_bytes:],
        begins=bool(flags & _SYN),
        opens=bool(flags & _SYN) and not flags & _ACK,
        ends=bool(flags & (_FIN | _RST)),
    )


def _ipv4_packet(frame: bytes) -> bytes | None:
    """Return a whole, unfragmented IPv4 packet without the padding of short frames.

    None for other frames.
    """
    start = _ETHERNET_BYTES
    if frame[12:14] == _VLAN.to_bytes(2, "big"):
        start += 4
    packet = frame[start:]
    if (
        frame[start - 2 : start] != _IPV4.to_bytes(2, "big")
        or len(packet) < _LEAST_HEADER_BYTES
    ):
        return None
    version, header_bytes = packet[0] >> 4, 4 * (packet[0] & 15)
    total_bytes, _, fragment = struct.unpack_from(">HHH", packet, 2)
    # 0 if segmentation is offloaded: the packet is larger than the field can say
    total_bytes = total_bytes or len(packet)
    # 0x3FFF: a fragment has the flag MF or an offset; DF, the bit above, only forbids
    # fragments
    if (
        version != 4
        or fragment & 0x3FFF
        or not _LEAST_HEADER_BYTES <= header_bytes <= total_bytes <= len(packet)
    ):
        return None
    return packet[:total_bytes]
