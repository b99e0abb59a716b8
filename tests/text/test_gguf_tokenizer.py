"""Tokenizers of GGUF files: every rule of splitting under llama.cpp's names, types of tokens, and what is refused."""

# ruff: noqa: E501  pieces of one text stand on one line
from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import regex
from gguf import GGUFReader
from tokenizers import Regex, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from support.real_models import needs_smollm2
from truedraft.errors import ModelError, UnsupportedModelError
from truedraft.models.embedded import smollm2_file
from truedraft.text.gguf_tokenizer import SPLITS, read_tokenizer

LLAMACPP = Path(__file__).parents[2] / ".models" / "llama.cpp"
"""Where `make test-formats` puts llama.cpp's vocabularies, and what it makes of texts by each."""

TEXT = "It'S 1234567 días,\n\n  x=y_2 'told you 你好 ёжa\u0301 I've/\n ٣٤ HTMLPage aÉ (a  b)\r\n\n"
# What the expressions of llama.cpp (llama-cpp-python 0.3.36) make of it, run by the package `regex`; pieces are set off by "¦". (tekken and
# gpt-4o: those of the models' own tokenizers, which that file quotes; its substitutes leave out marks and know no
# capital letters but ASCII's.)
PIECES = {
    "default": "It¦'¦S¦ ¦123¦456¦7¦ días¦,¦\n\n ¦ x¦=¦y¦_¦2¦ ¦'¦told¦ you¦ 你好¦ ёжa¦\u0301¦ I¦'¦ve¦/¦\n¦ ¦٣٤¦ HTMLPage¦ aÉ¦ ¦(¦a¦ ¦ b¦)¦\r\n\n",
    "minicpm5 llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano jais-2 dbrx smaug-bpe chatglm-bpe glm4 glm5": "It¦'S¦ ¦123¦456¦7¦ días¦,\n\n¦ ¦ x¦=y¦_¦2¦ '¦told¦ you¦ 你好¦ ёжa¦\u0301¦ I¦'ve¦/\n¦ ¦٣٤¦ HTMLPage¦ aÉ¦ (¦a¦ ¦ b¦)\r\n\n",
    "deepseek-llm": "It¦'¦S¦ ¦1234567¦ d¦í¦as¦,¦\n¦\n¦ ¦ x¦=¦y¦_¦2¦ '¦told¦ you¦ ¦你好¦ ёж¦a¦\u0301¦ I¦'¦ve¦/¦\n¦ ¦٣٤¦ HTMLPage¦ a¦É¦ (¦a¦ ¦ b¦)¦\r¦\n¦\n",
    "deepseek-coder": "It¦'¦S¦ ¦1¦2¦3¦4¦5¦6¦7¦ días¦,¦\n¦\n¦ ¦ x¦=¦y¦_¦2¦ '¦told¦ you¦ ¦你好¦ ёжa¦\u0301¦ I¦'¦ve¦/¦\n¦ ¦٣¦٤¦ HTMLPage¦ aÉ¦ (¦a¦ ¦ b¦)¦\r¦\n¦\n",
    "deepseek-v3 hunyuan-dense hy_v4 joyai-llm": "It¦'S¦ ¦123¦456¦7¦ días¦,\n\n¦ ¦ x¦=y¦_¦2¦ '¦told¦ you¦ ¦你好¦ ёжa\u0301¦ I¦'ve¦/\n¦ ¦٣٤¦ HTMLPage¦ aÉ¦ (¦a¦ ¦ b¦)\r\n\n",
    "spark2_5": "It¦'S¦ ¦1¦2¦3¦4¦5¦6¦7¦ días¦,¦\n¦\n¦ ¦ x¦=y¦_¦2¦ '¦told¦ you¦ ¦你好¦ ёжa\u0301¦ I¦'ve¦/¦\n¦ ¦٣¦٤¦ HTMLPage¦ aÉ¦ (¦a¦ ¦ b¦)¦\r¦\n¦\n",
    "youtu": "It'S¦ ¦1¦2¦3¦4¦5¦6¦7¦ días¦,\n\n¦ ¦ x¦=y¦_¦2¦ '¦told¦ you¦ ¦你好¦ ёжa\u0301¦ I've¦/\n¦ ¦٣¦٤¦ HTMLPage¦ a¦É¦ (¦a¦ ¦ b¦)\r\n\n",
    "falcon": "It¦'¦S¦ ¦123¦456¦7¦ días¦,¦\n\n ¦ x¦=¦y¦_¦2¦ ¦'¦told¦ you¦ 你好¦ ёжa¦\u0301¦ I¦'¦ve¦/¦\n¦ ٣٤¦ HTMLPage¦ aÉ¦ ¦(¦a¦ ¦ b¦)¦\r\n\n",
    "mpt gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en jina-v2-code roberta-bpe olmo jais exaone4 trillion granite-docling": "It¦'¦S¦ 1234567¦ días¦,¦\n\n ¦ x¦=¦y¦_¦2¦ '¦told¦ you¦ 你好¦ ёжa¦\u0301¦ I¦'ve¦/¦\n¦ ٣٤¦ HTMLPage¦ aÉ¦ (¦a¦ ¦ b¦)¦\r\n\n",
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": "It¦'¦S¦ ¦1¦2¦3¦4¦5¦6¦7¦ días¦,¦\n\n ¦ x¦=¦y¦_¦2¦ '¦told¦ you¦ 你好¦ ёжa¦\u0301¦ I¦'ve¦/¦\n ¦٣¦٤¦ HTMLPage¦ aÉ¦ (¦a¦ ¦ b¦)¦\r\n\n",
    "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez bailingmoe bailingmoe2 llada-moe hunyuan ufakzeka grok-2 solar-open": "It¦'S¦ ¦1¦2¦3¦4¦5¦6¦7¦ días¦,\n\n¦ ¦ x¦=y¦_¦2¦ '¦told¦ you¦ 你好¦ ёжa¦\u0301¦ I¦'ve¦/\n¦ ¦٣¦٤¦ HTMLPage¦ aÉ¦ (¦a¦ ¦ b¦)\r\n\n",
    "qwen35": "It¦'S¦ ¦1¦2¦3¦4¦5¦6¦7¦ días¦,\n\n¦ ¦ x¦=y¦_¦2¦ '¦told¦ you¦ 你好¦ ёжa\u0301¦ I¦'ve¦/\n¦ ¦٣¦٤¦ HTMLPage¦ aÉ¦ (¦a¦ ¦ b¦)\r\n\n",
    "poro-chat bloom gpt3-finnish": "It'S¦ 1234567¦ días¦,\n\n ¦ x=y_2¦ 'told¦ you¦ 你好¦ ёжa\u0301¦ I've/¦\n¦ ٣٤¦ HTMLPage¦ aÉ¦ (¦a¦ ¦ b¦)\r\n\n",
    "viking": "It'S¦ ¦1¦2¦3¦4¦5¦6¦7¦ días¦,\n\n ¦ x=y_¦2¦ 'told¦ you¦ 你好¦ ёжa\u0301¦ I've/¦\n¦ ¦٣¦٤¦ HTMLPage¦ aÉ¦ (¦a¦ ¦ b¦)\r\n\n",
    "exaone-moe": "It¦'S¦ ¦1¦2¦3¦4¦5¦6¦7¦ días¦,\n¦\n¦ ¦ x¦=y¦_¦2¦ '¦told you 你好 ёжa\u0301 I¦'ve¦/\n¦ ¦٣¦٤¦ HTMLPage aÉ¦ (¦a¦ ¦ b¦)\r¦\n\n",
    "chameleon": "It¦'¦S¦ ¦1¦2¦3¦4¦5¦6¦7¦ días¦,¦\n¦\n¦  ¦x¦=¦y¦_¦2¦ ¦'¦told¦ you¦ 你好¦ ёжa¦\u0301¦ I¦'¦ve¦/¦\n¦ ¦٣¦٤¦ HTMLPage¦ aÉ¦ ¦(¦a¦  ¦b¦)¦\r¦\n¦\n",
    "gpt-4o llama4 kanana2 talkie minimax-m2": "It'S¦ ¦123¦456¦7¦ días¦,\n\n¦ ¦ x¦=y¦_¦2¦ '¦told¦ you¦ 你好¦ ёжa\u0301¦ I've¦/\n¦ ¦٣٤¦ HTMLPage¦ a¦É¦ (¦a¦ ¦ b¦)\r\n\n",
    "tekken": "It¦'S¦ ¦1¦2¦3¦4¦5¦6¦7¦ días¦,\n\n¦ ¦ x¦=y¦_¦2¦ '¦told¦ you¦ 你好¦ ёжa\u0301¦ I¦'ve¦/\n¦ ¦٣¦٤¦ HTMLPage¦ a¦É¦ (¦a¦ ¦ b¦)\r\n\n",
    "tiny_aya cohere2moe": "It'S¦ ¦1¦234¦567¦ días¦,\n\n¦ ¦ x¦=y¦_¦2¦ '¦told¦ you¦ 你好¦ ёжa\u0301¦ I've¦/\n¦ ¦٣٤¦ HTMLPage¦ a¦É¦ (¦a¦ ¦ b¦)\r\n\n",
    "superbpe": "It'S ¦1¦234¦567¦ días,\n\n  x=y_¦2¦ 'told you 你好 ёжa\u0301 I've/\n ¦٣٤¦ HTMLPage aÉ (a  b)\r\n\n",
    "seed-coder": "It¦'S¦ ¦1¦2¦3¦4¦5¦6¦7¦ días¦,¦\n\n¦ ¦ x¦=y¦_¦2¦ '¦told¦ you¦ 你好¦ ёжa¦\u0301¦ I¦'ve¦/¦\n¦ ¦٣¦٤¦ HTMLPage¦ aÉ¦ (¦a¦ ¦ b¦)¦\r\n\n",
    "afmoe": "It¦'S¦ ¦1¦234¦567¦ días¦,\n\n¦ ¦ x¦=y¦_¦2¦ '¦told¦ you¦ ¦你好¦ ёжa\u0301¦ I¦'ve¦/\n¦ ¦٣٤¦ HTMLPage¦ aÉ¦ (¦a¦ ¦ b¦)\r\n\n",
    "laguna": "It¦'S¦ ¦1¦2¦3¦4¦5¦6¦7¦ días¦,¦\n\n¦ ¦ x¦=y¦_¦2¦ '¦told¦ you¦ 你好¦ ёжa¦\u0301¦ I¦'ve¦/¦\n¦ ¦٣¦٤¦ HTMLPage¦ aÉ¦ (¦a¦ ¦ b¦)\r¦\n\n",
}  # fmt: skip
WHOLE_FIRST = {
    *["llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"],
    *["minicpm5", "youtu", "glm4", "glm5", "tekken"],
}
ADD_BOS = WHOLE_FIRST - {"minicpm5", "youtu", "glm4", "glm5"} | {"chameleon"}


@pytest.mark.parametrize("names", PIECES, ids=lambda names: names.split()[0])
def test_text_is_split_as_by_the_rule_that_is_named(names: str) -> None:
    for name in names.split():
        split = SPLITS[name]
        cut = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in split.patterns]
        )
        assert "¦".join(piece for piece, _ in cut.pre_tokenize_str(TEXT)) == PIECES[names]
        assert (split.whole_first, split.adds_bos) == (name in WHOLE_FIRST, name in ADD_BOS)


def test_every_rule_is_held_by_pieces_that_are_written_down() -> None:
    assert {name for names in PIECES for name in names.split()} == set(SPLITS)


# --- a vocabulary of bytes, two pairs, and tokens that are matched as a whole ---

_LETTERS = [chr(n) for n in (*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x144))]
BEGIN, END, THINK, WIDE = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<think>", "<|im_end|>"
TOKENS = [*_LETTERS, "th", "Ċt", BEGIN, END, THINK, WIDE]
TYPES = [1] * (len(TOKENS) - 4) + [3, 3, 4, 1]


def fields(**changed: Any) -> dict[str, Any]:
    """Of a file, by their whole names; None takes one away."""
    said = {
        "model": "gpt2",
        "pre": "deepseek-v3",
        "tokens": TOKENS,
        "token_type": TYPES,
        "merges": ["t h", "Ċ t"],
        "bos_token_id": TOKENS.index(BEGIN),
        "eos_token_id": TOKENS.index(END),
        "add_bos_token": True,
        **changed,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in said.items() if value is not None}


def ids_of(*tokens: str) -> list[int]:
    return [TOKENS.index(token) for token in tokens]


def test_a_token_is_what_its_type_says() -> None:
    """Control tokens with wide bars, and one that looks like a control token and is a text's."""
    tokenizer = read_tokenizer("m.gguf", fields())
    assert tokenizer is not None
    assert len(tokenizer) == len(TOKENS) and tokenizer.bos_token_id == TOKENS.index(BEGIN)
    assert tokenizer(f"th{THINK}{END}th").input_ids == ids_of(BEGIN, "th", THINK, END, "th")
    assert tokenizer("<|").input_ids == ids_of(BEGIN, "<", "|")
    assert [tokenizer.added_tokens_decoder[n].special for n in ids_of(BEGIN, END, THINK)] == [True, True, False]
    assert TOKENS.index(WIDE) not in tokenizer.added_tokens_decoder
    assert tokenizer.decode(ids_of(BEGIN, "th", THINK, END), skip_special_tokens=True) == "th<think>"


@pytest.mark.parametrize(("said", "framed"), [(True, True), (False, False), (None, False)])
def test_texts_begin_as_the_file_says_or_else_as_its_rule(said: bool | None, framed: bool) -> None:
    tokenizer = read_tokenizer("m.gguf", fields(add_bos_token=said, add_eos_token=said))
    assert tokenizer is not None
    inner = ids_of("th")
    assert tokenizer("th").input_ids == (ids_of(BEGIN) + inner + ids_of(END) if framed else inner)
    by_rule = read_tokenizer("m.gguf", fields(pre="llama-bpe", add_bos_token=None))
    assert by_rule is not None and by_rule("th").input_ids == ids_of(BEGIN, "th")


def test_a_whole_token_comes_before_merges_where_the_rule_says_so() -> None:
    """`th` is a token and no merge leads to it."""
    for rule, expected in (("llama-bpe", ["th"]), ("qwen2", ["t", "h"])):
        tokenizer = read_tokenizer("m.gguf", fields(pre=rule, merges=["Ċ t"], add_bos_token=False))
        assert tokenizer is not None and tokenizer("th").input_ids == ids_of(*expected)


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"pre": "kimi-k2"}, UnsupportedModelError, "by the rule 'kimi-k2'"),
        ({"pre": "of-tomorrow"}, UnsupportedModelError, "by the rule 'of-tomorrow'"),
        ({"merges": ["t ö"]}, ModelError, "cannot be made"),
        ({"merges": None}, ModelError, "which pieces merge"),
        ({"token_type": TYPES[1:]}, ModelError, f"{len(TOKENS)} tokens and {len(TOKENS) - 1} types"),
        ({"tokens": [*TOKENS[:-1], "th"]}, ModelError, "the token 'th' twice"),
        ({"bos_token_id": 5000}, ModelError, "names token 5000 as its bos_token"),
        ({"bos_token_id": None}, ModelError, "says add_bos_token and names no such token"),
        ({"model": "llama", "scores": None}, ModelError, "not as many scores"),
    ],
)
def test_what_cannot_be_read_is_refused(changed: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=regex.escape(said)) as raised:
        read_tokenizer("m.gguf", fields(**changed))
    assert "m.gguf" in str(raised.value)


def test_a_file_without_a_rule_is_split_by_llamacpps_default(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = read_tokenizer("m.gguf", fields(pre=None))
    assert tokenizer is not None and "does not say how text is split" in caplog.text
    assert tokenizer.backend_tokenizer.pre_tokenizer is not None
    cut = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a 1234!?")
    assert [piece for piece, _ in cut] == ["a", "Ġ", "123", "4", "!?"]


def test_scores_and_bytes_of_sentencepiece(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ab` has a higher score than `bc`; what no token has is bytes; the space before a text may be left out."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), "▁", "a", "b", "c", "ab", "bc", "▁ab"]
    said = {
        "model": "llama",
        "tokens": tokens,
        "token_type": [2, 3, 3] + [6] * 256 + [1] * 7,
        "scores": [0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -1.0, -2.0, -3.0],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_bos_token": None,
        "merges": None,
        "pre": "default",
    }
    for prefix, expected in ((None, ["<s>", "▁ab", "c"]), (False, ["<s>", "ab", "c"])):
        tokenizer = read_tokenizer("m.gguf", fields(**said, add_space_prefix=prefix))
        assert tokenizer is not None
        assert tokenizer.convert_ids_to_tokens(tokenizer("abc").input_ids) == expected
        ids = tokenizer("bé</s>c").input_ids
        spaced = ["▁"] if prefix is None else []
        assert tokenizer.convert_ids_to_tokens(ids) == [
            "<s>", *spaced, "b", "<0xC3>", "<0xA9>", "</s>", *spaced, "c"
        ]  # fmt: skip
        assert tokenizer.decode(ids[: ids.index(2)], skip_special_tokens=True) == "bé"


# --- real vocabularies ---


def merged(piece: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    """Byte pairs the slow way: the pair of the lowest rank, the leftmost first, until none is left."""
    parts = list(piece)
    while pairs := [(ranks[pair], at) for at, pair in enumerate(itertools.pairwise(parts)) if pair in ranks]:
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def digits_then_gpt2(text: str) -> Iterator[str]:
    """SmolLM2's rule, by another library of regular expressions."""
    for part in regex.findall(r"\p{N}|\P{N}+", text):
        yield from regex.findall(r"'(?:[stmd]|re|ve|ll)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", part)


def test_smollm2_reads_lists_sums_and_code_as_its_file_says() -> None:
    needs_smollm2()
    file = smollm2_file()
    assert file is not None
    said = {name: each.contents() for name, each in GGUFReader(file).fields.items() if name.startswith("tokenizer.")}
    tokenizer = read_tokenizer(str(file), said)
    assert tokenizer is not None
    assert tokenizer("Steps:\n\n1. Boil water.").input_ids[:5] == [21831, 42, 1116, 33, 30]
    ranks = {tuple(merge.split(" ")): n for n, merge in enumerate(said["tokenizer.ggml.merges"])}
    numbers = {token: n for n, token in enumerate(said["tokenizer.ggml.tokens"])}
    letters = bytes_to_unicode()
    for text in (
        "Steps:\n\n1. Boil water.\n2. Add 250 g of pasta.\n\n\n- done, isn't it?",
        "def f(x):\n    return x**2 + 10_000 * 3.14159\n\n\nfor i in range(1024):\n\tprint(f'{i:04d}')\n",
        "12 + 345 = 357; in 1999, 50% of 2,000 is 1000. Ünïcödé ٣٤ 你好 🙂",
    ):
        pieces = ["".join(letters[byte] for byte in piece.encode()) for piece in digits_then_gpt2(text)]
        expected = [numbers[token] for piece in pieces for token in merged(piece, ranks)]
        assert tokenizer(text).input_ids == expected


def vectors() -> list[Any]:
    found = sorted(LLAMACPP.rglob("ggml-vocab-*.gguf.out"))
    return found or [pytest.param(None, marks=pytest.mark.skip(f"{LLAMACPP} is absent; make test-formats fetches it"))]


@pytest.mark.parametrize("out", vectors(), ids=lambda out: out and out.name.split(".")[0])
def test_texts_become_llamacpps_own_ids(out: Path) -> None:
    file = out.with_suffix("")
    said = {name: each.contents() for name, each in GGUFReader(file).fields.items() if name.startswith("tokenizer.")}
    tokenizer = read_tokenizer(str(file), said)
    if tokenizer is None:
        pytest.skip(f"transformers reads {said['tokenizer.ggml.model']!r}")
    texts = file.with_suffix(".gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    expected = [[int(n) for n in line.split()] for line in out.read_text().split("\n")]
    assert [tokenizer(text, add_special_tokens=False).input_ids for text in texts] == expected[: len(texts)]
