"""Certificates for tests, created by the program openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from moe_ckpt.config import TlsConfig
from moe_ckpt.replication.tls import TlsEnds, open_tls

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Authority:
    """Signs the certificates of nodes.

    Attributes:
        certificate: Path of the authority's own certificate.
    """

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip(
                "certificates: got no program openssl, wanted one that makes them"
            )
        folder.mkdir()
        self._folder = folder
        self.certificate, self._key = folder / "authority.pem", folder / "authority.key"
        made = (
            "-x509",
            "-keyout",
            str(self._key),
            "-out",
            str(self.certificate),
            "-subj",
            f"/CN={folder.name}",
        )
        _openssl("req", *_NEW_KEY, *made)

    def config_of(self, node: str, authority: Authority | None = None) -> TlsConfig:
        """Create a node's key and certificate, and return the node's settings.

        Args:
            node: Name of the node.
            authority: The authority that the node trusts. None: this authority.
        """
        certificate, key, request = (
            self._folder / f"{node}.{ending}" for ending in ("pem", "key", "csr")
        )
        _openssl(
            "req",
            *_NEW_KEY,
            "-keyout",
            str(key),
            "-out",
            str(request),
            "-subj",
            f"/CN={node}",
        )
        signing = (
            "-CA",
            str(self.certificate),
            "-CAkey",
            str(self._key),
            "-CAcreateserial",
        )
        _openssl(
            "x509", "-req", "-in", str(request), *signing, "-out", str(certificate)
        )
        trusted = (authority or self).certificate
        return TlsConfig(
            certificate=str(certificate), key=str(key), authority=str(trusted)
        )

    def ends_of(self, node: str, authority: Authority | None = None) -> TlsEnds:
        """Return the TLS contexts of a node; see `config_of`."""
        ends = open_tls(self.config_of(node, authority))
        assert ends is not None
        return ends


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
