"""The tokenizer described in a GGUF file: how text is split, which pieces merge, and the type of each token.

`tokenizer.ggml.pre` names the rule by which text is split before merging. The rules are those of the models' own
tokenizers, under llama.cpp's names (`llama_vocab_pre_type` in llama-vocab.h).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_base import generate_merges

from truedraft.errors import ModelError, UnsupportedModelError, first_line

_log = logging.getLogger(__name__)
_SPACE = "\u2581"  # SentencePiece's symbol for a space
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # types of tokens that are matched as a whole; see gguf's TokenType
_NAMED = {  # transformers' name of a token, and the file's
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",  # as GGUF spells it
    "pad_token": "padding",
    "mask_token": "mask",
}


@dataclass(frozen=True, slots=True)
class Split:
    """How text is split into the pieces within which tokens merge.

    The regular expressions are in Oniguruma's notation, each applied to the pieces of those before it; its matches and
    the text between them are pieces.
    """

    patterns: tuple[str, ...]
    whole_first: bool = False  # a piece that is a token stays one, whatever merges would make of it
    adds_bos: bool = False  # whether a text begins with the begin-of-text token if the file does not say


_ENDINGS = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"  # of English words: 's, 't, 're, ...
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_THREES = r"\p{N}{1,3}"
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_ASCII_SIGNS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"


def _words(digits: str, *, endings: str = f"(?:{_ENDINGS})|", signs: str = r"]+[\r\n]*", lines: str = _LINES) -> str:
    """GPT-4's rule, varied by most later ones: signs belong to the word after them, line breaks to the text before."""
    return rf"{endings}[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}{signs}|{lines}"


def _cased(digits: str, endings: str = "") -> str:
    """GPT-4o's rule: a word also begins at an uppercase letter after a lowercase one."""
    other, small = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}[{other}]*[{small}]+{endings}|{before}[{other}]+[{small}]*{endings}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"
    )


_MARKED = (  # DeepSeek 3's: letters with their marks, and a sign with the ASCII letters after it
    rf"{_ASCII_SIGNS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+"
)
_DEEPSEEK_LETTERS = (  # cased letters that DeepSeek LLM lists: all but those of later scripts and of formulas
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^"
    "\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c8f\u2d00-\u2d2d\ua790-\ua7ff\uab30-\uab6f"
    "\U00010570-\U000105bc\U00010d50-\U00010d85\U00016e40-\U00016e7f\U0001d400-\U0001d7cb\U0001df00-\U0001df1e]]"
)
_HAN_AND_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_ASIAN = (  # AFMoE's: Han, kana, Thai, Lao, Khmer, Burmese, Hangul
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff"
    "\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"

_LLAMA3 = Split((_words(_THREES),), whole_first=True, adds_bos=True)
_GPT2_SPLIT, _DIGITS_FIRST = Split((_GPT2,)), Split((_DIGIT, _GPT2))
_QWEN2, _GPT4 = Split((_words(_DIGIT),)), Split((_words(_THREES),))
_DEEPSEEK3 = Split((_THREES, _CJK, rf"{_MARKED}[\r\n]*|{_LINES}"))
_GPT4O = Split((_cased(_THREES, f"(?:{_ENDINGS})?"),))
_TINY_AYA = Split((r"\d{1,3}(?=(?:\d{3})*\b)", *_GPT4O.patterns))
_BAILING = Split((_words(_DIGIT, lines=r"\s*[\r\n]|\s+(?!\S)|\s+"),))

_QWEN35 = Split((
    rf"(?:{_ENDINGS})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}",
))  # fmt: skip
_EXAONE_MOE = Split((
    rf"(?:{_ENDINGS})|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
))  # fmt: skip
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    f"|[\u3105-\u312f]+|{_CJK}"
)
_DEEPSEEK_LLM = Split((
    r"[\r\n]", rf"\s?{_DEEPSEEK_LETTERS}+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$", _HAN_AND_HANGUL, r"\p{N}+",
))  # fmt: skip
_CHAMELEON = (
    "<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", _DIGIT, r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)  # fmt: skip
_BLANKS = "".join(rf"|\s{{{n}}}(?!\S)" for n in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2"))

_BY_SPLIT: tuple[tuple[Split, str], ...] = (
    (Split((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")), "default"),
    (_GPT2_SPLIT, "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en"),
    (_GPT2_SPLIT, "jina-v2-code roberta-bpe mpt olmo jais trillion granite-docling exaone4"),
    (_DIGITS_FIRST, "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"),
    (_LLAMA3, "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"),
    (_GPT4, "dbrx smaug-bpe chatglm-bpe"),
    (Split(_GPT4.patterns, whole_first=True), "glm4 glm5"),
    (Split((_THREES, _words(r"\p{N}+")), whole_first=True), "minicpm5"),
    (_QWEN2, "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2"),
    (Split((_words(_DIGIT, endings=""),)), "ufakzeka"),
    (Split((r"[^\n]+|\n+", *_QWEN2.patterns)), "laguna"),
    (_QWEN35, "qwen35"),
    (Split((_words(_DIGIT, signs=r"\r\n]+"),)), "seed-coder"),
    (_BAILING, "bailingmoe bailingmoe2 llada-moe"),
    (_EXAONE_MOE, "exaone-moe"),
    (Split((_cased(_DIGIT),), whole_first=True, adds_bos=True), "tekken"),
    (_GPT4O, "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (_TINY_AYA, "tiny_aya cohere2moe"),
    (Split((_YOUTU, _cased(_DIGIT, f"(?:{_ENDINGS})?")), whole_first=True), "youtu"),
    (_DEEPSEEK_LLM, "deepseek-llm"),
    (Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, _DIGIT)), "deepseek-coder"),
    (_DEEPSEEK3, "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
    (Split((_THREES, _CJK, rf"{_MARKED}|[\r\n]|\s+(?!\S)|\s+", _DIGIT)), "spark2_5"),
    (Split((r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _ASIAN, *_DEEPSEEK3.patterns[2:])), "afmoe"),
    (Split((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")), "falcon"),
    (Split((_BLOOM,)), "poro-chat bloom gpt3-finnish"),
    (Split((_BLOOM, _DIGIT)), "viking"),
    (Split(_CHAMELEON, adds_bos=True), "chameleon"),
    (Split((_words(_THREES, lines=rf"\s*[\r\n]+{_BLANKS}|\s"),)), "jais-2"),
    (Split((r"\p{N}+", r"(?=(\d{3})+(?!\d))")), "superbpe"),
)
SPLITS: Mapping[str, Split] = {name: split for split, names in _BY_SPLIT for name in names.split()}
"""Rules by the names of `tokenizer.ggml.pre`."""


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """A file's description of its tokens; `path` is for error messages."""

    path: str
    tokens: Sequence[str]
    types: Sequence[int]
    named: Mapping[str, str]  # special tokens by transformers' names
    said: Mapping[str, Any]  # the file's other fields, without `tokenizer.ggml.`

    def whole(self) -> list[AddedToken]:
        """Tokens that are matched as a whole before a text is split: control tokens, and user-defined ones."""
        return [
            AddedToken(token, normalized=False, special=kind != _USER_DEFINED)
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED) or (kind == _UNKNOWN and token != self.named.get("unk_token"))
        ]


def read_tokenizer(path: str, said: Mapping[str, Any]) -> PreTrainedTokenizerFast | None:
    """The tokenizer of a file, by its fields `tokenizer.*`; None for kinds that transformers builds (Gemma's, T5's)."""
    fields = {name.removeprefix("tokenizer.ggml."): value for name, value in said.items()}
    kind = fields.get("model")
    if kind not in ("gpt2", "llama"):
        return None
    vocabulary = _vocabulary(path, fields)
    try:
        built = _byte_level(vocabulary) if kind == "gpt2" else _sentencepiece(vocabulary)
        built.add_tokens(vocabulary.whole())
    except ModelError:
        raise
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"the tokenizer of {path!r} cannot be made: {first_line(error)}; fetch it again") from error
    if built.get_vocab_size() != len(vocabulary.tokens):
        raise ModelError(f"{path!r} has tokens that are no part of its vocabulary; fetch it again")
    return PreTrainedTokenizerFast(
        tokenizer_object=built,
        clean_up_tokenization_spaces=False,
        chat_template=said.get("tokenizer.chat_template"),
        **vocabulary.named,
    )


def _vocabulary(path: str, fields: Mapping[str, Any]) -> _Vocabulary:
    tokens: list[str] = [token or f"[EMPTY_{number}]" for number, token in enumerate(fields["tokens"])]
    types = fields.get("token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"{path!r} has {len(tokens)} tokens and {len(types)} types of them; fetch it again")
    if len(set(tokens)) != len(tokens):
        ((twice, _),) = Counter(tokens).most_common(1)
        raise ModelError(f"{path!r} has the token {twice!r} twice; fetch it again")
    named = {}
    for name, word in _NAMED.items():
        number = fields.get(f"{word}_token_id")
        if number is not None:
            if not 0 <= number < len(tokens):
                raise ModelError(
                    f"{path!r} names token {number} as its {name}, and has {len(tokens)} tokens; fetch it again"
                )
            named[name] = tokens[number]
    return _Vocabulary(path, tokens, types, named, fields)


def _byte_level(vocabulary: _Vocabulary) -> Tokenizer:
    """Byte-level BPE: tokens are spelled in GPT-2's alphabet of bytes, except those matched as a whole."""
    name = vocabulary.said.get("pre")
    if name is None:
        _log.warning(
            "%r does not say how text is split (tokenizer.ggml.pre); llama.cpp's default is taken, and a file that "
            "its present convert_hf_to_gguf.py wrote would be read better",
            vocabulary.path,
        )
    split = SPLITS.get(name or "default")
    if split is None:
        raise UnsupportedModelError(
            f"{vocabulary.path!r} splits text by the rule {name!r} (tokenizer.ggml.pre), which truedraft does not "
            "know; get the model as a Hugging Face folder"
        )
    merges = vocabulary.said.get("merges")
    if merges is None:
        raise ModelError(f"{vocabulary.path!r} does not say which pieces merge (tokenizer.ggml.merges); fetch it again")
    numbers = {token: number for number, token in enumerate(vocabulary.tokens)}
    built = Tokenizer(models.BPE(numbers, [_pair(merge) for merge in merges], ignore_merges=split.whole_first))
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in split.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    built.decoder = decoders.ByteLevel()
    _frame(built, vocabulary, split.adds_bos)
    return built


def _pair(merge: str) -> tuple[str, str]:
    """The two parts of a merge; the first may begin with a space: `"  a"` is `(" ", "a")`."""
    at = merge.find(" ", 1)
    return merge[:at], merge[at + 1 :]


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    """SentencePiece BPE: scores order the merges, and text without token becomes bytes."""
    said, tokens = vocabulary.said, vocabulary.tokens
    numbers = {token: number for number, token in enumerate(tokens)}
    scores = said.get("scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelError(f"{vocabulary.path!r} has {len(tokens)} tokens and not as many scores; fetch it again")
    whole = {token.content for token in vocabulary.whole()}
    merges = generate_merges(numbers, dict(zip(tokens, scores, strict=True)), skip_tokens=whole)
    unknown = vocabulary.named.get("unk_token")
    built = Tokenizer(models.BPE(numbers, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    before = [normalizers.Prepend(_SPACE)] if said.get("add_space_prefix", True) else []
    built.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", _SPACE)])
    after = [decoders.Strip(" ", 1, 0)] if before else []
    built.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after])
    _frame(built, vocabulary, adds_bos=True)
    return built


def _frame(built: Tokenizer, vocabulary: _Vocabulary, adds_bos: bool) -> None:
    marks, tokens = {"bos_token": "", "eos_token": ""}, []
    for name, by_default, mark in (("bos_token", adds_bos, "{}:0 "), ("eos_token", False, " {}:0")):
        flag, token = f"add_{name}", vocabulary.named.get(name)
        if not vocabulary.said.get(flag, by_default):
            continue
        if token is not None:
            tokens.append((token, vocabulary.tokens.index(token)))
            marks[name] = mark.format(token)
        elif flag in vocabulary.said:
            raise ModelError(f"{vocabulary.path!r} says {flag} and names no such token; fetch it again")
    if tokens:
        first, last = marks.values()
        built.post_processor = processors.TemplateProcessing(
            single=f"{first}$A:0{last}", pair=f"{first}$A:0 $B:1{last}", special_tokens=tokens
        )
