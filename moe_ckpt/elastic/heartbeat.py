"""A worker's heartbeat: a thread that writes signs of life to the status page.

Must not: touch anything else.
"""

from __future__ import annotations

import threading

from moe_ckpt.elastic.status_page import StatusPage

BEAT_EVERY_S = 0.05


def start_heartbeat(page: StatusPage) -> None:
    """Start to write signs of life, for as long as the process lives."""
    threading.Thread(
        target=_beat, args=(page, threading.Event()), name="heartbeat", daemon=True
    ).start()


def _beat(page: StatusPage, never: threading.Event) -> None:
    while not never.wait(BEAT_EVERY_S):
        page.beat()
