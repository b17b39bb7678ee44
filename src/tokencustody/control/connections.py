"""HTTP connections with bounds, so that slow or many clients take nothing from the others.

uvicorn waits without end for the rest of a request's head, and for a client to take its answer.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 256
# From the opening of a connection, or its last answer, until the head of the next request is complete.
HEAD_SECONDS = 10.0
# How long a client may take for an answer that fits no buffer, and how many bytes a second it must take beyond that.
ANSWER_SECONDS = 30.0
_ANSWER_RATE = 100_000


class _StrictParser(h11.Connection):
    """Refuses what a proxy in front may read in another way, so that the bytes after it are not one client's own."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if names >= {b"content-length", b"transfer-encoding"}:
                raise h11.RemoteProtocolError("a length beside chunks")
            if event.http_version not in (b"1.0", b"1.1"):
                raise h11.RemoteProtocolError("another version of HTTP")
        return event


class BoundedConnection(H11Protocol):
    """uvicorn's connection, cut off when its client is too slow, or when it waits and others need its place.

    Among more than MAX_CONNECTIONS, the one that has waited longest for its client's next request is closed; when all
    others are being answered, that is the new one.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = _StrictParser(h11.SERVER)
        # Since when it waits for its client's next request; None while one is being answered.
        self._waiting_since: float | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._answer_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._note_whose_turn_it_is()
        if len(self.connections) > MAX_CONNECTIONS:
            waiting = {
                each._waiting_since: each
                for each in self.connections
                if isinstance(each, BoundedConnection) and each._waiting_since is not None
            }
            longest = waiting[min(waiting)]
            # Now, since several connections may be opened before its end is noticed.
            self.connections.discard(longest)
            longest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._head_timer, self._answer_timer):
            if timer is not None:
                timer.cancel()

    def handle_events(self) -> None:
        super().handle_events()
        self._note_whose_turn_it_is()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note_whose_turn_it_is()

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None:
            # What is still to come from the app has no place after this.
            self.cycle.disconnected = True
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()  # the answer was given while the body was still coming

    def pause_writing(self) -> None:
        super().pause_writing()
        patience = ANSWER_SECONDS + self.transport.get_write_buffer_size() / _ANSWER_RATE
        self._answer_timer = self.loop.call_later(patience, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._answer_timer is not None:
            self._answer_timer.cancel()

    def _note_whose_turn_it_is(self) -> None:
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering:
            self._waiting_since = None
            if self._head_timer is not None:
                self._head_timer.cancel()
        elif self._waiting_since is None:
            self._waiting_since = self.loop.time()
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)
