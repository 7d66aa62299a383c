"""What an event stream holds is given back, whenever the client goes away."""

import asyncio
import contextlib
import gc
import weakref
from contextlib import AsyncExitStack

import pytest
from starlette.requests import ClientDisconnect

from pykvq.server.sse import event_stream


class Held:
    """What a generator keeps alive, as the chunks of a reply do."""

    async def events(self):
        while True:
            yield "data: x\n\n"
            await asyncio.sleep(0)


@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
@pytest.mark.parametrize("n_sent", [0, 1, 3])
def test_a_client_that_goes_away(spec_version, n_sent):
    """With none sent, the client is gone before the first event is asked for."""
    released, sent = [], []

    async def send(message):
        sent.append(message)
        if spec_version == "2.4" and len(sent) > n_sent:
            raise OSError

    async def receive():
        while len(sent) < n_sent:
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def test():
        resources = AsyncExitStack()
        resources.callback(released.append, True)
        held = Held()
        gone = weakref.ref(held)
        response = event_stream(held.events(), resources)
        del held
        scope = {"type": "http", "asgi": {"spec_version": spec_version}}
        with contextlib.suppress(ClientDisconnect):
            await response(scope, receive, send)
        gc.collect()
        assert released == [True]
        assert gone() is None

    asyncio.run(test())


def test_a_client_that_goes_away_while_the_next_event_is_awaited(monkeypatch):
    """Its end is noticed when a comment is sent, in the middle of the generator's own waiting."""
    monkeypatch.setattr("pykvq.server.sse._KEEP_ALIVE_SECONDS", 0.01)
    released, closed = [], []

    async def events():
        try:
            await asyncio.Event().wait()
            yield "never"
        finally:
            closed.append(True)

    async def send(message):
        if b"keep-alive" in message.get("body", b""):
            raise OSError

    async def test():
        resources = AsyncExitStack()
        resources.callback(released.append, True)
        scope = {"type": "http", "asgi": {"spec_version": "2.4"}}
        with pytest.raises(ClientDisconnect):
            await event_stream(events(), resources)(scope, None, send)
        assert (closed, released) == ([True], [True])

    asyncio.run(test())
