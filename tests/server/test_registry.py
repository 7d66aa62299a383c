"""Models that come and go: on demand, idle, and under a budget."""

import asyncio

import httpx
import pytest

from pykvq import InvalidArgumentError
from pykvq.server.app import create_app
from pykvq.server.settings import LoadOptions, ModelSpec, ServerSettings, parse_models
from server.conftest import running_server, wait_until

PROMPT = {"prompt": "x", "max_tokens": 1}


def states(url):
    return {model["id"]: model["state"] for model in httpx.get(f"{url}/v1/models").json()["data"]}


def complete(url, model):
    return httpx.post(f"{url}/v1/completions", json={**PROMPT, "model": model}, timeout=120)


def test_a_model_is_loaded_when_it_is_asked_for_and_unloaded_when_idle(smollm2_path):
    with running_server({"a": smollm2_path, "b": smollm2_path}, idle_unload=1.0) as (url, _):
        assert complete(url, "b").json()["model"] == "b"
        wait_until(lambda: states(url) == {"a": "not-loaded", "b": "not-loaded"})
        assert complete(url, None).json()["model"] == "a"
        assert states(url)["a"] == "loaded"


def test_idle_models_make_room_within_the_budget(smollm2_path):
    size = smollm2_path.stat().st_size
    # one model with its cache fits, two do not
    with running_server({"a": smollm2_path, "b": smollm2_path}, memory_budget=int(2.6 * size)) as (url, _):
        for model in ("a", "b", "a"):
            assert complete(url, model).status_code == 200
            assert states(url) == {name: "loaded" if name == model else "not-loaded" for name in "ab"}
    with running_server({"a": smollm2_path}, memory_budget=size) as (url, _):
        response = complete(url, "a")
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "out_of_memory"


def test_a_request_while_the_model_loads_is_503(smollm2_path):
    with running_server({"a": smollm2_path}, load_wait=0.0) as (url, _):
        first = complete(url, "a")
        if first.status_code != 200:
            assert (first.status_code, first.json()["error"]["code"]) == (503, "model_loading")
            assert first.headers["retry-after"] == "1"
        wait_until(lambda: httpx.get(f"{url}/health").status_code == 200)
        assert complete(url, "a").status_code == 200


def test_a_broken_model_does_not_stop_the_others(smollm2_path, tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\0" * 100)
    with running_server({"broken": broken, "good": smollm2_path}) as (url, _):
        wait_until(lambda: states(url)["broken"] == "failed")
        assert httpx.get(f"{url}/health").status_code == 503
        response = complete(url, "broken")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "model_load_failed")
        assert complete(url, "good").status_code == 200
        assert httpx.get(f"{url}/health").status_code == 200


def test_names_of_models(tmp_path):
    first, second = tmp_path / "m.gguf", tmp_path / "other" / "m.gguf"
    second.parent.mkdir()
    for path in (first, second):
        path.write_bytes(b"GGUF")
    names = [spec.name for spec in parse_models([str(first), f"big={second}"])]
    assert names == ["m", "big"]
    with pytest.raises(InvalidArgumentError, match="two models are called 'm'"):
        parse_models([str(first), str(second)])
    with pytest.raises(InvalidArgumentError, match="not found"):
        parse_models([str(tmp_path / "none.gguf")])


def test_a_server_without_models_tells_so_and_takes_one_at_any_time(smollm2_path):
    options = LoadOptions(kv_quant="q8_0", n_slots=1, n_ctx=256, n_threads=2)

    async def steps(registry, client):
        assert (await client.get("/health")).json() == {"status": "ok", "models": {}}
        assert (await client.get("/kv")).json() == {"models": {}}
        response = await client.post("/v1/completions", json=PROMPT)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        for name in ("first", "second"):
            await registry.open(ModelSpec(name, smollm2_path), options)
            assert (await client.post("/v1/completions", json=PROMPT)).json()["model"] == name
            assert list(registry.entries) == [name]
        kv = (await client.get("/kv")).json()["models"]["second"]
        assert (kv["kv_quant"], kv["n_ctx"]) == ("q8_0", 256)
        await registry.remove("second")
        assert (await client.post("/v1/completions", json=PROMPT)).status_code == 404

    async def run():
        app = create_app(ServerSettings(models=()))
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=120) as client,
        ):
            await steps(app.state.context.registry, client)

    asyncio.run(run())
