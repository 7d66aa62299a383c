"""The models of the app: found, picked, fetched with a pause, and left out."""

import asyncio

import pytest
from hub_server import HubServer

pytest.importorskip("nicegui")

from pykvq.desktop.database import Database
from pykvq.desktop.desk import Desk
from pykvq.desktop.library import PICKED, Library
from pykvq.desktop.records import Records
from pykvq.errors import InvalidArgumentError, ModelFileError

CONTENT = b"GGUF" + bytes(3_000_000)
NAME = "Tiny-Q4_K_M.gguf"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A user without models."""
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "PYKVQ_MODELS_DIR", "LLAMA_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("PYKVQ_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def library(tmp_path):
    database = Database(tmp_path / "data")
    yield Library(Records(database))
    database.close()


def test_a_picked_file_is_listed_until_it_is_left_out(library, smollm2_path):
    assert library.all() == []
    path = library.pick(f' "{smollm2_path}" ')
    library.pick(str(smollm2_path))
    (model,) = library.all()
    assert (model.local.path, model.local.source) == (path, PICKED)
    assert model.facts.context_length == 8192
    assert model.problem is None
    library.remove(model.local)
    assert library.all() == []
    assert path.exists()


def test_files_that_are_no_models_are_not_picked(library, tmp_path):
    with pytest.raises(InvalidArgumentError, match="there is no file"):
        library.pick("nothing.gguf")
    (tmp_path / "text.gguf").write_text("text")
    with pytest.raises(ModelFileError):
        library.pick(str(tmp_path / "text.gguf"))
    assert library.all() == []


def test_a_damaged_model_is_listed_with_its_problem(library, tmp_path):
    folder = tmp_path / "cache" / "models"
    folder.mkdir(parents=True)
    (folder / "bad.gguf").write_bytes(b"GGUF" + bytes(50))
    (model,) = library.all()
    assert model.facts is None
    assert "bad.gguf" in model.problem
    library.remove(model.local)
    assert not (folder / "bad.gguf").exists()


def test_a_download_without_network_tells_so_and_goes_on_later(tmp_path, monkeypatch):
    async def steps(desk, server):
        desk.start(None)
        (job,) = [desk.start_download("hf:org/repo"), desk.start_download("hf:org/repo")][:1]
        assert desk.jobs == [job], "a second click begins no second download"
        await job.task
        assert job.state == "failed"
        assert "goes on where it stopped" in job.error
        assert "\n" not in job.error
        server.drop_after.clear()
        desk.restart_job(job)
        (again,) = desk.jobs
        await again.task
        assert (again.state, again.error) == ("done", None)
        assert again.result.read_bytes() == CONTENT
        await desk.close()

    with HubServer(files={NAME: CONTENT}, drop_after=[100_000] * 50) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)

        async def run():
            await steps(Desk(tmp_path / "desk"), server)

        asyncio.run(run())


def test_a_download_is_paused_and_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 100_000)

    async def steps(desk, server):
        desk.start(None)
        job = desk.start_download("hf:org/repo")
        report, job_require = job.require, []

        def pausing(done):
            job_require.append(done)
            if done > 0.4:
                job.cancel()
            report(done)

        job.require = pausing
        await job.task
        assert job.state == "cancelled"
        desk.restart_job(job)
        (again,) = desk.jobs
        await again.task
        assert (again.state, again.error) == ("done", None)
        assert again.result.read_bytes() == CONTENT
        assert server.downloads()[-1].startswith("bytes=")
        await desk.close()

    with HubServer(files={NAME: CONTENT}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)

        async def run():
            await steps(Desk(tmp_path / "desk"), server)

        asyncio.run(run())
