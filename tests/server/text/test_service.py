"""The text service: which tokenizer serves a variant, what it costs others, and hostile files at the first request."""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
from dataclasses import replace as replace_fields
from pathlib import Path

import pytest

from deltastore.errors import ArtifactError, VariantNotFound, VariantQuarantined
from deltastore.registry import Registry
from deltastore.registry.records import VersionRecord
from deltastore.verified_object import TakeFile, VariantFiles, read_files
from server.errors import InvalidRequest, WorkerDied
from server.protocol.request import SamplingParams
from server.registry_calls import RegistryCalls
from server.text import service as service_module
from server.text import service as staging
from server.text import worker_tasks
from server.text.chat_template import Conversation
from server.text.detokenizer import IncrementalDetokenizer
from server.text.service import TextService
from server.text.worker_tasks import BYTES_PER_FILE_BYTE, NotLoaded
from server.workers.pool import WorkerPool
from tests.deltastore.helpers.stored import flip_byte
from tests.helpers.tiny_models import CHAT_TEMPLATE, make_tokenizer
from tests.server.helpers.texts import ROWS, Texts, files_of, make_texts
from tests.server.helpers.worker_processes import WAIT_S
from tests.server.helpers.worker_tasks import kill_itself

MAX_TOKENS = 512
CONVERSATION = Conversation([{"role": "user", "content": "hi"}])


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return make_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def own_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a tokenizer with two tokens more than the base's."""
    return files_of(make_tokenizer(2, CHAT_TEMPLATE), tmp_path_factory.mktemp("own"))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The digests of the variants whose files have been read."""
    digests: list[str] = []

    def counted(registry: Registry, of: VersionRecord, take: TakeFile) -> VariantFiles:
        digests.append(of.digest)
        return read_files(registry, of, take)

    monkeypatch.setattr(staging, "read_files", counted)
    return digests


def test_few_cold_variants_are_staged_at_a_time_and_a_tenant_leaves_one_to_others(
    texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = []
    for number in range(5):
        (tmp_path / f"files-{number}").mkdir()
        records.append(texts.publish(files_of(make_tokenizer(3 + number), tmp_path / f"files-{number}")))
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    entered: list[str] = []

    async def main() -> None:
        calls = RegistryCalls(str(texts.registry.root), lambda: None)
        staged = staging.Staging(texts.base_dir, texts.registry, calls, several_tenants=True)
        may_end = asyncio.Event()

        async def use(tenant: str, record: VersionRecord) -> None:
            async with staged.staged(record, (tenant, record.digest)) as found:
                assert (found.path or temporary).joinpath("tokenizer.json").stat().st_size
                entered.append(tenant)
                await may_end.wait()

        uses = [asyncio.create_task(use("a", record)) for record in records]
        uses += [asyncio.create_task(use("a", records[0])), asyncio.create_task(use("b", records[4]))]
        while len(entered) < 4:
            await asyncio.sleep(0.01)
        # Two versions of one tenant, one of them for two requests, and one of the other's.
        assert sorted(entered) == ["a", "a", "a", "b"]
        assert len(list(temporary.iterdir())) == 3
        may_end.set()
        await asyncio.gather(*uses)
        while list(temporary.iterdir()):
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), WAIT_S))
    assert len(entered) == 7


def test_a_variant_without_files_has_the_base_s_text(texts: Texts) -> None:
    record = texts.publish({})

    async def test(service: TextService, pool: WorkerPool) -> None:
        text, base = await service.of(record, "default"), await service.of(None, "default")
        assert await text.encode("abc", MAX_TOKENS) == await base.encode("abc", MAX_TOKENS)
        assert text.num_embeddings == ROWS != base.num_embeddings == 300
        assert text.generation.eos_token_ids == base.generation.eos_token_ids == {257}
        ids = (await text.render_chat(CONVERSATION, MAX_TOKENS)).ids
        assert await text.decode(ids) == "<user>hi\n<assistant>"

    texts.run(test)


def test_a_variant_brings_its_tokens_template_and_defaults(texts: Texts, own_files: dict[str, bytes]) -> None:
    generation = {"eos_token_id": 260, "do_sample": True, "top_k": 5}
    template = b"{{ messages[0].content }}!"
    generation_file = json.dumps(generation).encode()
    record = texts.publish(
        {**own_files, "chat_template.jinja": template, "generation_config.json": generation_file}
    )

    async def test(service: TextService, pool: WorkerPool) -> None:
        text = await service.of(record, "default")
        assert await text.encode("<added-1>", MAX_TOKENS) == [260]
        ids = (await text.render_chat(CONVERSATION, MAX_TOKENS)).ids
        assert await text.decode(ids) == "hi!"
        assert [each.text for each in await text.token_texts(ids)] == ["h", "i", "!"]
        assert text.generation.eos_token_ids == {260}
        assert text.generation.defaults == {"top_k": 5}
        detokenizer = IncrementalDetokenizer(SamplingParams())
        [new] = await text.decode_streams([detokenizer.push(ids, is_last=True)])
        assert detokenizer.take(new).texts == ("h", "i", "!")

    texts.run(test)


def test_a_variant_that_changes_only_the_template_has_the_base_s_tokenizer(
    texts: Texts, own_files: dict[str, bytes]
) -> None:
    record = texts.publish({"chat_template.jinja": b"{{ bos_token }}[{{ messages[0].content }}]"})

    async def test(service: TextService, pool: WorkerPool) -> None:
        text = await service.of(record, "default")
        assert await text.decode((await text.render_chat(CONVERSATION, MAX_TOKENS)).ids) == "[hi]"

    texts.run(test)


@pytest.mark.parametrize("form", ["config", "files", "templates alone"])
def test_a_template_is_chosen_by_its_name_and_by_tools(
    texts: Texts, own_files: dict[str, bytes], form: str
) -> None:
    named = {"default": "D", "tool_use": "T", "rag": "R"}
    config = json.loads(own_files["tokenizer_config.json"])
    config["chat_template"] = [{"name": name, "template": source} for name, source in named.items()]
    templates = {
        "chat_template.jinja": b"D",
        "additional_chat_templates/tool_use.jinja": b"T",
        "additional_chat_templates/rag.jinja": b"R",
    }
    without = {name: content for name, content in own_files.items() if name != "chat_template.jinja"}
    files = {
        "config": {**without, "tokenizer_config.json": json.dumps(config).encode()},
        "files": {**without, **templates},
        "templates alone": templates,
    }
    record = texts.publish(files[form])
    messages = CONVERSATION.messages

    async def test(service: TextService, pool: WorkerPool) -> None:
        text = await service.of(record, "default")
        for conversation, wanted in (
            (CONVERSATION, "D"),
            (Conversation(messages, tools=b"[{}]"), "T"),
            (Conversation(messages, tools=b"[{}]", template="rag"), "R"),
        ):
            assert await text.decode((await text.render_chat(conversation, MAX_TOKENS)).ids) == wanted
        with pytest.raises(InvalidRequest, match="no template with the name"):
            await text.render_chat(Conversation(messages, template="{{ 1 }}"), MAX_TOKENS)

    texts.run(test)


def test_the_base_s_templates_have_their_names(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"default": "D", "tool_use": "T"}
    texts = make_texts(tmp_path, tokenizer)
    record = texts.publish({})

    async def test(service: TextService, pool: WorkerPool) -> None:
        with_tools = Conversation(CONVERSATION.messages, tools=b"[{}]")
        for text in (await service.of(None, "default"), await service.of(record, "default")):
            assert await text.decode((await text.render_chat(CONVERSATION, MAX_TOKENS)).ids) == "D"
            assert await text.decode((await text.render_chat(with_tools, MAX_TOKENS)).ids) == "T"

    texts.run(test)


def test_many_tokens_of_the_base_are_decoded_as_few_are(texts: Texts) -> None:
    async def test(service: TextService, pool: WorkerPool) -> None:
        text = await service.of(None, "default")
        ids = await text.encode("naïve 漢字", MAX_TOKENS)
        assert await text.decode(ids * 500) == "naïve 漢字" * 500
        assert await text.token_strings(ids * 500) == 500 * await text.token_strings(ids)

    texts.run(test)


def test_a_variant_without_a_template_has_none_though_its_base_has(texts: Texts, tmp_path: Path) -> None:
    record = texts.publish(files_of(make_tokenizer(2), tmp_path))

    async def test(service: TextService, pool: WorkerPool) -> None:
        text = await service.of(record, "default")
        with pytest.raises(InvalidRequest, match="no chat template"):
            await text.render_chat(CONVERSATION, MAX_TOKENS)

    texts.run(test)


def test_a_base_without_a_template_is_not_told_to_publish_one(tmp_path: Path) -> None:
    async def test(service: TextService, pool: WorkerPool) -> None:
        text = await service.of(None, "default")
        with pytest.raises(InvalidRequest, match="the base has no chat template: ask a variant that has one"):
            await text.render_chat(CONVERSATION, MAX_TOKENS)

    make_texts(tmp_path, make_tokenizer()).run(test)


def test_twenty_first_requests_read_the_variant_once(
    texts: Texts, own_files: dict[str, bytes], reads: list[str]
) -> None:
    record = texts.publish(own_files)

    async def test(service: TextService, pool: WorkerPool) -> None:
        async def first_request() -> list[int]:
            return await (await service.of(record, "default")).encode("<added-0>", MAX_TOKENS)

        ids = await asyncio.gather(*(first_request() for _ in range(20)))
        assert ids == [[259]] * 20
        assert len(reads) == 1

    # Of two workers a share has one, so no second worker has to load the tokenizer.
    texts.run(test)


def test_a_worker_that_lacks_a_tokenizer_gets_its_files_again(
    texts: Texts, own_files: dict[str, bytes]
) -> None:
    record = texts.publish(own_files)

    async def test(service: TextService, pool: WorkerPool) -> None:
        text = await service.of(record, "default")
        # Ends the worker that has it loaded.
        with pytest.raises(WorkerDied):
            await pool.run(("default", record.digest), 60.0, kill_itself)
        assert await text.encode("<added-0>", MAX_TOKENS) == [259]

    texts.run(test)


def test_a_corrupt_object_serves_no_file_and_is_quarantined(
    texts: Texts, own_files: dict[str, bytes]
) -> None:
    record = texts.publish({**own_files, "chat_template.jinja": b"corrupt {{ messages }}"})
    path = texts.registry.object_path(record)
    path.chmod(0o644)
    flip_byte(path, path.read_bytes().index(b"corrupt"))

    async def test(service: TextService, pool: WorkerPool) -> None:
        for _ in range(2):
            with pytest.raises(VariantQuarantined):
                await service.of(record, "default")

    texts.run(test)


def test_an_object_that_is_gone_is_not_found(texts: Texts, own_files: dict[str, bytes]) -> None:
    record = texts.publish({**own_files, "chat_template.jinja": b"gone"})
    texts.registry.object_path(record).unlink()

    async def test(service: TextService, pool: WorkerPool) -> None:
        with pytest.raises(VariantNotFound):
            await service.of(record, "default")

    texts.run(test)


@pytest.mark.parametrize("damage", ["gone", "corrupt", "unusable"])
def test_each_tenant_is_told_of_its_own_version_when_bytes_are_shared(
    texts: Texts, own_files: dict[str, bytes], damage: str
) -> None:
    broken = {"tokenizer.json": b"{}"} if damage == "unusable" else {}
    files = {**own_files, **broken, "chat_template.jinja": f"shared {damage}".encode()}
    acme = replace_fields(texts.publish(files), tenant="acme", name="secret")
    globex = replace_fields(acme, tenant="globex", name="hidden")
    path = texts.registry.object_path(acme)
    path.chmod(0o644)
    if damage == "corrupt":
        flip_byte(path, path.read_bytes().index(b"shared"))
    elif damage == "gone":
        path.unlink()

    async def test(service: TextService, pool: WorkerPool) -> None:
        of = [service.of(record, record.tenant) for record in (acme, globex)]
        first, second = map(str, await asyncio.gather(*of, return_exceptions=True))
        assert "secret" in first
        assert "hidden" in second
        assert not re.search("globex|hidden", first)
        assert not re.search("acme|secret", second)

    texts.run(test)


def test_a_tokenizer_that_another_tenant_s_work_has_loaded_fails_under_the_caller_s_name(
    texts: Texts, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["a" * 200_000])
    acme = replace_fields(texts.publish(files_of(tokenizer, tmp_path)), tenant="acme", name="secret")
    globex = replace_fields(acme, tenant="globex", name="hidden")

    async def test(service: TextService, pool: WorkerPool) -> None:
        for record in (acme, globex):
            text = await service.of(record, record.tenant)
            with pytest.raises(
                ArtifactError, match=f"^{record.label}: its tokenizer makes 200000 characters"
            ):
                await text.decode([len(tokenizer) - 1])

    # One worker, which keeps the tokenizer that it has loaded for the first.
    texts.run(test, num_workers=1)


def test_a_cancelled_first_request_leaves_the_others_their_result(
    texts: Texts, own_files: dict[str, bytes]
) -> None:
    record = texts.publish({**own_files, "chat_template.jinja": b"shared"})

    async def test(service: TextService, pool: WorkerPool) -> None:
        first, second = (asyncio.create_task(service.of(record, "default")) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        assert (await second).num_embeddings == ROWS
        assert first.cancelled()

    texts.run(test)


def test_facts_of_many_variants_are_kept_within_a_bound_of_bytes(
    texts: Texts, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [texts.publish({"chat_template.jinja": b"x" * 100_000 + b"%d" % number}) for number in range(4)]
    monkeypatch.setattr(service_module, "CACHE_BYTES", 1_000_000)

    async def test(service: TextService, pool: WorkerPool) -> None:
        for record in (*records, records[-1], records[0]):
            await service.of(record, "default")
        # Two fit: the last one is read once, the first one again.
        assert reads == [record.digest for record in (*records, records[0])]

    texts.run(test)


def test_a_tenant_s_many_variants_drive_out_no_facts_of_others(
    texts: Texts, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *others = (texts.publish({"chat_template.jinja": b"y" * 100_000 + b"%d" % n}) for n in range(6))
    monkeypatch.setattr(service_module, "CACHE_BYTES", 1_000_000)

    async def test(service: TextService, pool: WorkerPool) -> None:
        await service.of(first, "honest")
        for record in others:
            await service.of(record, "hostile")
        await service.of(first, "honest")
        assert reads == [record.digest for record in (first, *others)]

    texts.run(test)


def test_the_first_load_of_a_tokenizer_keeps_those_of_tenants_that_have_less(
    own_files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content in own_files.items():
        (tmp_path / name).write_bytes(content)
    size = BYTES_PER_FILE_BYTE * sum(map(len, own_files.values()))
    monkeypatch.setattr(worker_tasks, "CACHE_BYTES", 2 * size)
    loaded = worker_tasks.LoadedTokenizers()
    kept = loaded.get("honest", tmp_path, "honest", "honest/v@1")
    for number in range(4):
        loaded.get(f"hostile-{number}", tmp_path, "hostile", "hostile/v@1")
    assert loaded.get("honest", None, "honest", "honest/v@1") is kept
    with pytest.raises(NotLoaded):
        loaded.get("hostile-2", None, "hostile", "hostile/v@1")


def test_no_files_are_left_behind(
    texts: Texts, own_files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = texts.publish({**own_files, "chat_template.jinja": b"left"})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def test(service: TextService, pool: WorkerPool) -> None:
        await (await service.of(record, "default")).encode("abc", MAX_TOKENS)
        assert not list(tmp_path.glob("peraxis-tokenizer-*"))

    texts.run(test)
    assert not list(tmp_path.iterdir())
