"""The engine glue: answers stream, are saved, stopped and told to all windows."""

import asyncio
import shutil
import time
from dataclasses import replace

import pytest

pytest.importorskip("nicegui")

from pykvq.desktop.answer import chat_messages
from pykvq.desktop.conversations import Attachment, Conversation, Message
from pykvq.desktop.desk import Desk
from pykvq.desktop.forecast import Forecast, Forecaster
from pykvq.desktop.pages.load_dialog import _cost
from pykvq.errors import AbortedError, BusyError, InvalidArgumentError, ModelFileError, StorageError
from pykvq.server.registry import ModelRegistry
from pykvq.server.settings import LoadOptions, ServerSettings

OPTIONS = LoadOptions(kv_quant="ultra4", n_slots=1, n_ctx=1024, n_threads=2)
ENDLESS = {"temperature": 0.0, "logit_bias": {"2": -100, "0": -100}}


def with_desk(tmp_path, steps):
    """Runs ``steps(desk)`` in an event loop."""

    async def run():
        desk = Desk(tmp_path / "data")
        registry = ModelRegistry(ServerSettings(models=()))
        desk.start(registry)
        try:
            return await steps(desk)
        finally:
            await desk.close()
            await registry.close()

    return asyncio.run(run())


def test_two_turns_a_branch_and_a_stopped_answer(tmp_path, smollm2_path):
    async def steps(desk):
        await desk.load(smollm2_path, OPTIONS)
        chat = desk.chats.create(sampling={"temperature": 0.0, "max_tokens": 12}).id
        grown = []
        desk.answer_grew.subscribe(lambda answer: grown.append(answer.text))
        for text in ("Say hello.", "Again."):
            answer = desk.send(chat, text)
            with pytest.raises(BusyError, match="stop it first"):
                desk.send(chat, "meanwhile")
            await answer.task
            assert answer.state == "complete"
        branch = desk.chats.branch(chat)
        assert [message.role for message in branch] == ["user", "assistant"] * 2
        assert [message.state for message in branch] == ["complete"] * 4
        assert branch[3].details["n_prompt_tokens"] > branch[1].details["n_prompt_tokens"]
        assert branch[3].details["tokens_per_second"] > 0
        assert grown[-1] == branch[3].content
        assert len(set(grown)) > 2

        await desk.edit(branch[0].id, "Say goodbye.").task
        assert desk.chats.branch(chat)[0].content == "Say goodbye."
        await desk.regenerate(desk.chats.branch(chat)[1].id).task
        assert len(desk.chats.branch(chat)[1].siblings) == 2
        desk.edit(desk.chats.branch(chat)[1].id, "My own words.")
        assert [message.content for message in desk.chats.branch(chat)] == ["Say goodbye.", "My own words."]
        desk.show(branch[0].id)
        assert [message.id for message in desk.chats.branch(chat)] == [message.id for message in branch]

        desk.change(chat, sampling=ENDLESS)
        answer = desk.send(chat, "Tell a story.")
        while not (saved := desk.chats.message(answer.message.id)).content:
            await asyncio.sleep(0.01)
        assert saved.state == "streaming"
        assert answer.text.startswith(saved.content)
        await desk.stop(chat)
        stopped = desk.chats.message(answer.message.id)
        assert (stopped.state, stopped.content) == ("stopped", answer.text)
        while desk.model.llm.stats().n_busy:  # until the step that is under way has ended
            await asyncio.sleep(0.01)

    with_desk(tmp_path, steps)


def test_an_answer_that_a_full_disk_does_not_take_is_kept_and_saved_later(tmp_path, smollm2_path):
    async def steps(desk):
        await desk.load(smollm2_path, OPTIONS)
        chat = desk.chats.create(sampling={"max_tokens": 4}).id

        def full(*_values):
            raise StorageError("the disk is full")

        write, desk.chats.write = desk.chats.write, full
        answer = desk.send(chat, "Hello")
        await answer.task
        assert (answer.state, answer.save_error) == ("complete", "the disk is full")
        assert desk.unsaved == {answer.message.id: answer}
        desk.chats.write = write
        await desk.send(chat, "Again").task
        assert desk.unsaved == {}
        assert desk.chats.message(answer.message.id).content == answer.text
        assert [message.state for message in desk.chats.branch(chat)] == ["complete"] * 4

    with_desk(tmp_path, steps)


def test_without_a_model_the_answer_tells_what_to_do(tmp_path):
    async def steps(desk):
        chat = desk.chats.create().id
        answer = desk.send(chat, "Hello")
        await answer.task
        message = desk.chats.branch(chat)[-1]
        assert message.state == "failed"
        assert "load one first" in message.details["error"]
        with pytest.raises(InvalidArgumentError, match="empty"):
            desk.send(chat, "  ")

    with_desk(tmp_path, steps)


def test_damaged_and_missing_files_are_told_and_another_model_can_be_loaded(tmp_path, smollm2_path):
    async def steps(desk):
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(smollm2_path.read_bytes()[:1_000_000])
        with pytest.raises(ModelFileError, match="cut"):
            await desk.load(cut, OPTIONS)
        assert desk.model.state == "failed"
        with pytest.raises(InvalidArgumentError, match="not found"):
            await desk.load(tmp_path / "none.gguf", OPTIONS)
        states = []
        desk.model_changed.subscribe(lambda: states.append(desk.model.state if desk.model else None))
        await desk.load(smollm2_path, OPTIONS)
        assert states == [None, "loading", "loaded"]
        assert list(desk.registry.entries) == [smollm2_path.stem]
        assert desk.library.last_load() == (smollm2_path, OPTIONS)
        await desk.unload()
        assert desk.model is None
        assert await desk.registry.kv_report() == {}

    with_desk(tmp_path, steps)


def test_deleting_can_be_undone_and_interrupted_answers_end_at_the_next_start(tmp_path):
    async def first(desk):
        chat = desk.chats.create("kept").id
        question = desk.chats.add(chat, "user", "question", parent=None)
        desk.chats.add(chat, "assistant", "part", parent=question.id, state="streaming")
        await desk.delete(chat)
        assert desk.chats.listed() == []
        desk.undo_delete()
        assert [each.title for each in desk.chats.listed()] == ["kept"]
        assert desk.deleted is None

    async def second(desk):
        (chat,) = desk.chats.listed()
        assert [message.state for message in desk.chats.branch(chat.id)] == ["complete", "stopped"]
        old = desk.chats.create("old").id
        await desk.delete(old)
        desk.database.rows("UPDATE conversation SET deleted = deleted - 8 * 86400 WHERE id = ?", old)

    async def third(desk):
        assert desk.database.row("SELECT count(*) FROM conversation")[0] == 1

    for steps in (first, second, third):
        with_desk(tmp_path, steps)


def test_settings_of_the_server_are_kept(tmp_path):
    async def first(desk):
        desk.change_server(is_on=False, api_keys=("k",))
        assert (desk.switch.is_on, desk.switch.api_keys) == (False, ("k",))

    async def second(desk):
        assert (desk.switch.is_on, desk.switch.api_keys) == (False, ("k",))

    with_desk(tmp_path, first)
    with_desk(tmp_path, second)


def test_a_model_that_is_deleted_while_it_is_loaded_answers_until_it_is_unloaded(tmp_path, smollm2_path):
    async def steps(desk):
        path = tmp_path / "copy.gguf"
        shutil.copyfile(smollm2_path, path)
        await desk.load(path, OPTIONS)
        desk.library.pick(str(path))
        path.unlink()
        assert [model for model in desk.library.all() if model.local.path == path] == []
        chat = desk.chats.create(sampling={"max_tokens": 4}).id
        await desk.send(chat, "Hello").task
        assert desk.chats.branch(chat)[-1].state == "complete"
        assert desk.library.last_load() is None
        await desk.unload()
        with pytest.raises(InvalidArgumentError, match="not found"):
            await desk.load(path, OPTIONS)

    with_desk(tmp_path, steps)


def test_clicks_on_what_is_under_way_begin_nothing_anew(tmp_path, smollm2_path, monkeypatch):
    asked = []

    def fetch(model, progress):
        asked.append(model)
        time.sleep(0.2)
        return smollm2_path

    monkeypatch.setattr("pykvq.catalog.fetch", fetch)

    async def steps(desk):
        states = []
        desk.model_changed.subscribe(lambda: states.append(desk.model.state if desk.model else None))
        await asyncio.gather(desk.start_demo(), desk.start_demo())
        assert len(asked) == 1
        assert desk.jobs == []
        assert states == [None, "loading", "loaded"]
        await asyncio.gather(desk.load(smollm2_path, OPTIONS), desk.load(smollm2_path, OPTIONS))
        assert states[3:] == [None, "loading", "loaded"]
        chat = desk.chats.create(sampling={"max_tokens": 4}).id
        answer = desk.send(chat, "Hello")
        await asyncio.gather(desk.stop(chat), desk.stop(chat))
        assert answer.state == "stopped"

        def work(job):
            return 1

        job = desk.start_job("measurement", "short", work)
        await job.task
        desk.restart_job(job)
        desk.restart_job(job)
        (again,) = desk.jobs
        await again.task
        desk.drop_job(again)
        desk.drop_job(again)
        assert desk.jobs == []

    with_desk(tmp_path, steps)


def test_a_load_can_be_ended(tmp_path, smollm2_path):
    async def steps(desk):
        loading = asyncio.create_task(desk.load(smollm2_path, OPTIONS))
        while desk.model is None:
            await asyncio.sleep(0)
        await desk.unload()
        with pytest.raises(AbortedError):
            await loading
        assert desk.model is None

    with_desk(tmp_path, steps)


def test_jobs_report_end_and_fail(tmp_path):
    async def steps(desk):
        def endless(job):
            while True:
                job.require(0.5)

        job = desk.start_job("measurement", "endless", endless)
        while job.progress == 0:
            await asyncio.sleep(0.01)
        job.cancel()
        await job.task
        assert job.state == "cancelled"

        def broken(job):
            raise InvalidArgumentError("no such thing")

        failed = desk.start_job("measurement", "broken", broken)
        await failed.task
        assert (failed.state, failed.error) == ("failed", "no such thing")
        desk.drop_job(failed)
        assert desk.jobs == [job]

    with_desk(tmp_path, steps)


def message(role, content, **fields):
    return Message(0, 0, None, role, content, "complete", {}, 0.0, **fields)


def test_the_prompt_has_alternating_roles_files_and_no_reasoning():
    chat = Conversation(1, "t", "", "Be brief.", {}, None, 0, 0)
    turns = chat_messages(
        chat,
        [
            message("user", "one", attachments=(Attachment("a.txt", "A"),)),
            message("assistant", "<think>hm</think>two"),
            message("user", "three"),
            message("assistant", ""),
            message("user", "four"),
        ],
    )
    assert turns == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "File a.txt:\n\nA\n\n---\n\none"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three\n\nfour"},
    ]


@pytest.mark.parametrize("kv_quant", ["f16", "ultra4", "ultra2", "f16:64+q8_0:512+q4_ve"])
def test_the_forecast_is_what_is_allocated(smollm2_path, tmp_path, kv_quant):
    options = replace(OPTIONS, kv_quant=kv_quant, n_ctx=4096)
    forecaster = Forecaster(smollm2_path)
    forecast = forecaster.forecast(options)
    forecaster.close()

    async def steps(desk):
        await desk.load(smollm2_path, options)
        return (await desk.registry.kv_report())[smollm2_path.stem]

    info = with_desk(tmp_path, steps)
    assert forecast.kv == info["kv_bytes"]
    assert len(forecast.tiers) == len(info["tiers"])
    for (_, n_bytes), tier in zip(forecast.tiers, info["tiers"], strict=True):
        assert n_bytes == pytest.approx(tier["n_bytes"], abs=0.12 * info["kv_bytes"])
    assert forecast.fits
    assert forecast.total <= forecast.total_f16


@pytest.mark.parametrize(
    ("available", "device", "available_device", "fits"),
    [(60, 0, 0, True), (59, 0, 0, False), (100, 5, 5, True), (100, 6, 5, False)],
)
def test_what_needs_more_than_is_free_does_not_fit(available, device, available_device, fits):
    forecast = Forecast(10, (("f16", 20), ("q4_ve", 20)), 10, 100, available, device, available_device, None)
    assert forecast.total == 60
    assert forecast.fits is fits


def test_what_a_format_costs_that_computes_nan():
    measured = {"kld_mean": None, "same_top": 0.0, "nonfinite": 1.0}
    forecast = Forecast(10, (("q8_0", 20),), 10, 100, 60, 0, 0, measured)
    assert _cost(forecast, OPTIONS) == "Measured on this model: ultra4: 100 % of the logits are not finite."
