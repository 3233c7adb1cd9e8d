"""TLS for copies between nodes, with certificates of one authority on both ends.

Owns: the contexts of both ends, and errors that name the setting. Must not: connect. No
end compares names in certificates with addresses: each certificate of the authority
belongs to a node of the job. Servers require the token of the run as well
(`replication.admission`).
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from moe_ckpt.config import TlsConfig, require


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TlsEnds:
    """The TLS contexts of a node."""

    client: ssl.SSLContext
    """Context for connections to other nodes."""

    server: ssl.SSLContext
    """Context for connections from other nodes."""


def open_tls(config: TlsConfig) -> TlsEnds | None:
    """Return the TLS contexts of a node, or None without TLS.

    Raises:
        ConfigError: A file cannot be used. The message names the setting.
    """
    if config.certificate is None or config.key is None or config.authority is None:
        return None
    # opened here first: ssl's own error for a missing file does not name the file
    for name, path in (
        ("certificate", config.certificate),
        ("key", config.key),
        ("authority", config.authority),
    ):
        try:
            Path(path).open("rb").close()
        except OSError as error:
            require(
                False,
                f"ckpt.tls.{name}",
                path,
                f"a file that can be read ({error.strerror})",
            )
    client, server = (
        _context(protocol, config.certificate, config.key, config.authority)
        for protocol in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER)
    )
    # no session tickets: no session is resumed, and a client that only sends would not
    # read the tickets
    server.num_tickets = 0
    return TlsEnds(client=client, server=server)


def describe_refusal(error: ssl.SSLError) -> str:
    """Return the reason for which one end has refused the other end."""
    detail = getattr(error, "verify_message", None) or error.reason or error
    return (
        f"TLS failed ({detail}): wanted ckpt.tls on all nodes, with certificates of one"
        " ckpt.tls.authority"
    )


def _context(
    protocol: int, certificate: str, key: str, authority: str
) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # a node is known by an address, which a scheduler chooses
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(authority)
    except ssl.SSLError as error:
        require(
            False,
            "ckpt.tls.authority",
            authority,
            f"certificates in PEM format ({error.reason or error})",
        )
    try:
        # without `password`, OpenSSL would ask for a password at the terminal
        context.load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        wanted = (
            "the private key, without a password, of"
            f" ckpt.tls.certificate={certificate} ({error.reason or error})"
        )
        require(False, "ckpt.tls.key", key, wanted)
    return context
