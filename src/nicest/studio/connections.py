"""Connections that end when their client stalls: before a request, or while it is answered."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from nicest.studio import limits


class Connection(H11Protocol):
    """One client. It is dropped if the head of a request takes too long, if it does not read what it is sent, and if
    there are too many others. (A body that takes too long is refused by the guard, in words.)"""

    reads: asyncio.TimerHandle | None = None
    sends: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > limits.CONNECTIONS:
            transport.abort()
        self.reads = self.loop.call_later(limits.HEAD_SECONDS, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self.reads, self.sends):
            if timer:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        asked = self.cycle is not None and not self.cycle.response_complete
        if asked and self.reads:
            self.reads.cancel()
            self.reads = None
        elif not asked and not self.reads:  # a part of the next request
            self.reads = self.loop.call_later(limits.HEAD_SECONDS, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.sends = self.loop.call_later(limits.SEND_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.sends:
            self.sends.cancel()
