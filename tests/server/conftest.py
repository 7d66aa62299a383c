import socket
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn

from pykvq.server.app import create_app
from pykvq.server.settings import ModelSpec, ServerSettings

API_KEY = "test-key"


@contextmanager
def running_server(models, **settings):
    """The base URL of a server in a thread of this process; ``models`` are paths by name."""
    specs = tuple(ModelSpec(name, Path(path)) for name, path in models.items())
    values = {"n_ctx": 1024, "n_slots": 2, "n_threads": 2, "kv_quant": "f16", **settings}
    app = create_app(ServerSettings(models=specs, **values))
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", app
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


@pytest.fixture(scope="package")
def server(smollm2_path):
    """A server with SmolLM2 under the name "smol", and a key."""
    with running_server({"smol": smollm2_path}, api_keys=(API_KEY,)) as (url, app):
        wait_until(lambda: httpx.get(f"{url}/health").status_code == 200)
        yield url, app


@pytest.fixture
def http(server):
    """An HTTP client that has the key."""
    with httpx.Client(base_url=server[0], headers={"Authorization": f"Bearer {API_KEY}"}, timeout=120) as client:
        yield client


@pytest.fixture
def stats(server):
    """Reads the counters of the model."""
    return lambda: server[1].state.context.registry.entries["smol"].llm.stats()


@pytest.fixture
def openai_client(server):
    import openai

    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key=API_KEY, max_retries=0, timeout=120) as client:
        yield client
