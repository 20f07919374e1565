"""The demo's tasks, words and tokenizers: prompts and answers, held-out items, and their tokens."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from deltastore.errors import UsageError
from peraxis.demo.tasks import Item, Task, frequent_words, is_held_out, make_tasks, read_sources
from peraxis.demo.train import CHAT_TOKENS, base_tokenizer, chat_tokenizer, prompt_ids

WORDS = [
    first + middle + last for first in "abcdefgh" for middle in "rstuv" for last in ("xy", "z", "mnopqz")
]
CHAT = Item("Spell ab.", "a-b", [{"role": "user", "content": "Spell ab."}])


@pytest.fixture(params=["upper", "reverse", "instruct"])
def task(request: pytest.FixtureRequest) -> Task:
    return make_tasks(WORDS)[request.param]


def test_no_word_of_a_held_out_item_is_trained_on(task: Task) -> None:
    trained = " ".join(item.prompt for item in task.items("train", 1000))
    held_out = [word for word in task.words if is_held_out(word)]
    assert held_out
    assert not [word for word in held_out if word in trained]


def test_held_out_items_are_of_different_words(task: Task) -> None:
    items = task.items("test", 5)
    assert max(Counter(item.prompt for item in items).values()) == 1


def test_items_depend_on_nothing_but_the_seed(task: Task) -> None:
    assert task.items("test", 5, seed=3) == task.items("test", 5, seed=3)
    assert task.items("test", 5, seed=3) != task.items("test", 5, seed=4)


def test_fewer_held_out_items_are_the_first_of_more(task: Task) -> None:
    assert task.items("test", 3) == task.items("test", 5)[:3]


def test_more_held_out_items_than_words_are_refused_with_their_number(task: Task) -> None:
    num_held_out = sum(map(is_held_out, task.words))
    with pytest.raises(UsageError, match=f"has {num_held_out} held-out words, 900 were asked for"):
        task.items("test", 900)


def test_every_answer_and_its_end_fit_the_limit_of_new_tokens(task: Task) -> None:
    answers = [item.answer for item in task.items("train", 500)]
    assert max(map(len, answers)) < task.max_new_tokens
    assert not [answer for answer in answers if "\n" in answer]


def test_an_answer_is_right_up_to_the_stop_and_letter_for_letter() -> None:
    task = make_tasks(WORDS)["upper"]
    item = Item("upper(ab)=", "AB")
    assert task.is_right(item, "AB\nand so on")
    assert not task.is_right(item, "AB.")
    assert not task.is_right(item, "Ab")


def test_each_task_asks_for_what_its_answers_are() -> None:
    tasks = make_tasks(["grape"])
    assert tasks["upper"].items("train", 1) == [Item("upper(grape)=", "GRAPE")]
    assert tasks["reverse"].items("train", 1) == [Item("reverse(grape)=", "eparg")]
    (chat,) = tasks["instruct"].items("train", 1)
    assert chat.answer.startswith('{"name": "grape", "size": ')
    assert chat.messages == [{"role": "user", "content": chat.prompt}]


def test_a_token_of_text_is_a_byte_and_its_id_the_value() -> None:
    tokenizer = base_tokenizer()
    assert tokenizer("é\n a")["input_ids"] == [tokenizer.bos_token_id, *"é\n a".encode()]
    assert tokenizer.decode(list("é\n a".encode())) == "é\n a"


def test_a_conversation_is_written_with_the_added_tokens() -> None:
    tokenizer = chat_tokenizer()
    user, assistant, end = (tokenizer.convert_tokens_to_ids(token) for token in CHAT_TOKENS)
    assert prompt_ids(tokenizer, CHAT) == [tokenizer.bos_token_id, user, *b"Spell ab.", end, assistant]
    assert len(tokenizer) == len(base_tokenizer()) + len(CHAT_TOKENS)


def test_the_base_reads_a_conversation_as_plain_text() -> None:
    tokenizer = base_tokenizer()
    assert prompt_ids(tokenizer, CHAT) == [tokenizer.bos_token_id, *b"<|user|>Spell ab.<|end|><|assistant|>"]


def test_a_saved_chat_tokenizer_brings_its_template_and_end_token(tmp_path: Path) -> None:
    chat_tokenizer().save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert (tmp_path / "chat_template.jinja").exists()
    assert loaded.eos_token == "<|end|>"
    assert prompt_ids(loaded, CHAT) == prompt_ids(chat_tokenizer(), CHAT)


def test_sources_are_read_in_order_without_tests_and_large_files(tmp_path: Path) -> None:
    half = b"#" * 199_999
    for name in ("z.py", "b/y.py", "b/x.py", "a.py", "c.py", "d.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode() + half[: -len(name)])
    for name in ("b/test/t.py", "site-packages/s.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(b"unwanted")
    (tmp_path / "large.py").write_bytes(half * 2)
    (tmp_path / "notes.txt").write_bytes(half)
    names = [source.split(b"#")[0] for source in read_sources(tmp_path)]
    assert names == [b"a.py", b"b/x.py", b"b/y.py", b"c.py", b"d.py", b"z.py"]


def test_a_python_without_sources_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="too few Python sources"):
        read_sources(tmp_path)


def test_words_are_whole_lower_case_and_seen_twice() -> None:
    sources = [
        b"once twice_twice Capital capital ab overlylongword x.three",
        b"three ab overlylongword Capital",
    ]
    assert frequent_words(sources) == ["three", "twice"]
