from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import BYTES, byte_level, llama_like, metaspace, small_llama
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from truedraft.errors import ModelError, ModelNotFoundError, PromptError
from truedraft.text.tokenizer import Tokenizer

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
)


def saved(backend: PreTrainedTokenizerFast, folder: Path) -> str:
    backend.save_pretrained(folder)
    return str(folder)


def loaded(folder: str) -> Tokenizer:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    return tokenizer


def test_a_folder_gives_the_ids_of_transformers(tmp_path: Path) -> None:
    for number, backend in enumerate([byte_level(), small_llama(), metaspace()]):
        folder = saved(backend, tmp_path / str(number))
        tokenizer = loaded(folder)
        text = "the quick é end\n"
        assert tokenizer.encode(text) == AutoTokenizer.from_pretrained(folder)(text).input_ids
        assert tokenizer.name == folder
        assert all(type(token) is int for token in tokenizer.encode(text))


def test_special_tokens_as_the_model_expects(llama: Tokenizer, bytes_bpe: Tokenizer) -> None:
    assert (llama.encode("the end")[0], llama.encode(""), bytes_bpe.encode("")) == (1, [1], [])
    assert llama.decode(llama.encode("the end")) == "the end"
    assert (llama.eos_token_ids, bytes_bpe.eos_token_ids) == ((2,), (0,))
    assert llama.byte_values == {3 + byte: byte for byte in range(256)} and bytes_bpe.byte_values == {}
    assert (llama.skipped_ids, bytes_bpe.skipped_ids) == ({0, 1, 2}, {0})  # <tool> is added but not special: it is text
    assert bytes_bpe.vocab_size == max(bytes_bpe.backend.get_vocab().values()) + 1 == len(bytes_bpe.backend)
    assert bytes_bpe.decode([bytes_bpe.vocab_size - 2]) == "<tool>"


def test_decode_leaves_spaces_alone(bytes_bpe: Tokenizer) -> None:
    text = "it 's  odd , is n't it ? <tool> é"
    assert bytes_bpe.decode(bytes_bpe.encode(text)) == text
    bytes_bpe.backend.clean_up_tokenization_spaces = True
    try:
        assert bytes_bpe.decode(bytes_bpe.encode(text)) == text
    finally:
        bytes_bpe.backend.clean_up_tokenization_spaces = False


# --- loading ----------------------------------------------------------------------------------------------------


def test_a_folder_without_tokenizer_files_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert Tokenizer.load(str(tmp_path)) is None


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_tokenizer_is_one_clear_sentence(tmp_path: Path, name: str) -> None:
    folder = saved(byte_level(), tmp_path)
    for broken in ("", "{not json", "{}", '{"model": {"type": "BPE"}}') if name == "tokenizer.json" else ("{",):
        (tmp_path / name).write_text(broken)
        with pytest.raises(ModelError, match="cannot be read") as caught:
            Tokenizer.load(folder)
        assert folder in str(caught.value) and "\n" not in str(caught.value)


def test_code_from_the_folder_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("raise SystemExit('ran')")
    (tmp_path / "config.json").write_text('{"model_type": "own"}')
    settings = {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="custom code"):
        Tokenizer.load(str(tmp_path))


def test_no_such_folder(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for name in ("./nowhere", "/no/such/folder", "~/no-such-folder-here", "a/b/c", str(tmp_path / "tokenizer.json")):
        with pytest.raises(ModelNotFoundError, match="no such folder"):
            Tokenizer.load(name)


HUB = """
import sys
from truedraft.errors import ModelError, ModelNotFoundError
from truedraft.text.tokenizer import Tokenizer
for name in sys.argv[1:]:
    try:
        tokenizer = Tokenizer.load(name)
        print(name, "None" if tokenizer is None else tokenizer.encode("the")[0])
    except ModelNotFoundError as error:
        print(name, "ModelNotFoundError")
    except ModelError as error:
        print(name, "ModelError")
"""


def test_hub_names_offline(tmp_path: Path) -> None:
    """From the hub's cache: a good one, one without tokenizer, a broken one, and one that is not there."""
    for name in ("good", "bare", "broken"):
        repository = tmp_path / "hub" / f"models--me--{name}"
        snapshot = repository / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("0" * 40)
        (snapshot / "config.json").write_text('{"model_type": "llama"}')
        if name != "bare":
            small_llama().save_pretrained(snapshot)
    (tmp_path / "hub" / "models--me--broken" / "snapshots" / ("0" * 40) / "tokenizer.json").write_text("{")
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    names = ["me/good", "me/bare", "me/broken", "me/absent"]
    command = [sys.executable, "-c", HUB, *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n")[:4] == [
        "me/good 1",
        "me/bare None",
        "me/broken ModelError",
        "me/absent ModelNotFoundError",
    ]


# --- chat -------------------------------------------------------------------------------------------------------


def test_chat(bytes_bpe: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert bytes_bpe.decode(bytes_bpe.chat(messages, template=CHAT)) == "<user>hi:"
    backend = byte_level()
    backend.chat_template = CHAT
    assert bytes_bpe.decode(Tokenizer(backend).chat(messages)) == "<user>hi:"
    with pytest.raises(PromptError, match="no chat template"):
        bytes_bpe.chat(messages)
    with pytest.raises(PromptError, match="roles must alternate"):
        bytes_bpe.chat(messages, template="{{ raise_exception('roles must alternate') }}")


# --- one vocabulary or two --------------------------------------------------------------------------------------


def test_saved_and_loaded_is_the_same_in_the_old_and_the_new_form(tmp_path: Path) -> None:
    folder, first = saved(byte_level(), tmp_path), Tokenizer(byte_level())
    again, file = loaded(folder), tmp_path / "tokenizer.json"
    assert first.same_vocabulary(again) and first.difference(again) == "" and len(first.fingerprint) == 64
    described = json.loads(file.read_text())
    described["model"]["merges"] = [" ".join(merge) for merge in described["model"]["merges"]]
    described["truncation"] = {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps(described))
    assert loaded(folder).fingerprint == first.fingerprint


def test_base_and_chat_model_are_the_same() -> None:
    """Another end of text, template and length limit: the ids mean the same."""
    base, tuned = byte_level(), byte_level()
    tuned.eos_token = tuned.pad_token = "<tool>"
    tuned.chat_template = CHAT
    tuned.model_max_length = 7
    assert Tokenizer(base).same_vocabulary(Tokenizer(tuned))


def test_differences_are_named() -> None:
    first = Tokenizer(byte_level(), "first")
    assert not first.same_vocabulary(Tokenizer(small_llama(), "second"))
    other = Tokenizer(byte_level(lines=["entirely other words are here to be merged"] * 3), "other")
    assert other.difference(first) != ""
    assert "in 'first' and" in first.difference(other)
    more = byte_level()
    more.add_tokens(["<pad>"])
    size = first.vocab_size
    assert first.difference(Tokenizer(more, "more")) == f"id {size} is absent in 'first' and '<pad>' in 'more'"


def test_same_ids_but_other_merges() -> None:
    words = ["<unk>", "<s>", "</s>", *BYTES, "▁", "a", "b", "ab", "ba"]
    vocab = {word: number for number, word in enumerate(words)}
    first = Tokenizer(llama_like(vocab, [("a", "b"), ("b", "a")]), "first")
    second = Tokenizer(llama_like(vocab, [("b", "a"), ("a", "b")]), "second")
    assert not first.same_vocabulary(second)
    assert first.difference(second) == "all ids agree, but rule 0 is 'a b' in 'first' and 'b a' in 'second'"


def test_one_token_here_and_cut_there() -> None:
    whole, cut = byte_level(), byte_level()
    whole.add_tokens(["the"])  # in the vocabulary already
    assert len(whole) == len(cut)
    first, second = Tokenizer(whole, "first"), Tokenizer(cut, "second")
    assert not first.same_vocabulary(second)
    assert "always one token in 'first'" in first.difference(second)


def test_a_class_with_its_own_way_to_decode_keeps_it() -> None:
    class Shouting(PreTrainedTokenizerFast):
        def _decode(self, *args: object, **kwargs: object) -> str:
            return str(super()._decode(*args, **kwargs)).upper()

    plain = byte_level()
    ids = plain.encode("some text")
    shouting = Shouting(tokenizer_object=plain.backend_tokenizer)
    assert Tokenizer(plain).decode(ids) == plain.decode(ids, skip_special_tokens=True) == "some text"
    assert Tokenizer(shouting).decode(ids) == "SOME TEXT"


@pytest.mark.parametrize("make", [byte_level, small_llama, metaspace])
def test_a_text_has_no_fewer_tokens_than_are_foretold(make: Callable[[], PreTrainedTokenizerFast]) -> None:
    """What is refused by this before it is tokenised is surely too long."""
    tokenizer = Tokenizer(make())
    assert (tokenizer.least_tokens("x" * 10_000) > 400) == (make is not metaspace), "Unigram may drop what it likes"
    texts = "x", "the quick brown fox " * 9, "e\u0301" * 50, "\U0001f600\u65e5" * 9, "<|end|>" * 9, " " * 99, "\x00", ""
    for text in texts:
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text))


@pytest.mark.parametrize(
    "change",
    [
        lambda backend: setattr(backend, "normalizer", normalizers.Replace(Regex(" +"), "")),
        lambda backend: setattr(backend, "normalizer", normalizers.NFKC()),
        lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.Whitespace()),
        lambda backend: backend.add_special_tokens([AddedToken("<|x|>", rstrip=True)]),
    ],
)
def test_where_texts_are_made_shorter_nothing_is_foretold(change: Callable[[Any], object]) -> None:
    backend = byte_level()
    change(backend.backend_tokenizer)
    assert Tokenizer(backend).least_tokens("x" * 10_000) == 0


def test_bytes_without_a_token_and_letters_that_are_composed_count_for_less() -> None:
    backend = byte_level()
    whole = Tokenizer(backend).least_tokens("x" * 900)
    described = json.loads(backend.backend_tokenizer.to_str())
    del described["model"]["vocab"]["x"]
    described["model"]["merges"] = [pair for pair in described["model"]["merges"] if "x" not in "".join(pair)]
    described["model"]["vocab"] = {word: n for word, n in described["model"]["vocab"].items() if "x" not in word}
    left = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=Backend.from_str(json.dumps(described))))
    assert left.least_tokens("x" * 900) == 0 == len(left.encode("x" * 900)) < left.least_tokens("y" * 900)
    backend.backend_tokenizer.normalizer = normalizers.NFC()
    assert Tokenizer(backend).least_tokens("x" * 900) == -(-whole // 3) > 0


def test_words_are_known_with_and_without_a_space(bytes_bpe: Tokenizer) -> None:
    for ids in bytes_bpe.word_ids(" tea"):
        assert bytes_bpe.decode(ids).strip() == "tea"
    assert bytes_bpe.word_ids(" tea") == bytes_bpe.word_ids("tea")
    assert bytes_bpe.word_ids("\n") == [bytes_bpe.plain_ids("\n")], "white space is a word, too"
    assert bytes_bpe.decode(bytes_bpe.word_ids("\ntea")[0]) == "\ntea"
