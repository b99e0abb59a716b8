"""A model's tokenizer: text to ids and back, chat templates, and whether two models share one vocabulary."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from inspect import signature
from itertools import takewhile
from pathlib import Path
from typing import Any, TypedDict, Unpack

from truedraft.errors import ModelError, ModelNotFoundError, OptionError, PromptError, PromptLengthError, first_line
from truedraft.text.control_tokens import ControlTokens, MarkedChat, refuse_half_characters, texts_in

# A folder or repository with none of these has no tokenizer; tokenizer_config.json names files of other names.
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "merges.txt", "vocab.txt",
    "spiece.model", "sentencepiece.bpe.model", "tekken.json",
)  # fmt: skip
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_WORD = "word"  # answer of the probe that shows what a template writes after it
_MOST_CLOSING = 2  # special tokens that close a turn: more belong to a larger form, and the last may open a turn
_WITH_NULL = "messages_with_null"
_COMPOSED = 3  # most UTF-8 bytes of a text per byte of its NFC
_TOO_DEEP = "messages, tools or chat_template_kwargs are nested too deeply; make them flatter"


class ChatOptions(TypedDict, total=False):
    """Options of a chat template.

    Attributes:
        template: replaces the model's own.
        continues: whether the answer continues the last message; otherwise it is a new one.
        most_tokens: limit for the chat; one that certainly exceeds it is refused before tokenization.
        trust_control_tokens: convert control tokens spelled in messages to the tokens; otherwise they stay text.
    """

    tools: Sequence[Mapping[str, Any]] | None
    template: str | None
    variables: Mapping[str, Any] | None
    continues: bool
    most_tokens: int
    trust_control_tokens: bool


class Tokenizer:
    """A Hugging Face tokenizer, reduced to what this package needs."""

    def __init__(self, backend: Any, name: str = "tokenizer") -> None:
        self.backend = backend
        self.name = name
        self._control: dict[str | None, ControlTokens] = {}  # by template
        self._holding: dict[str, dict[int, str]] = {}

    def __repr__(self) -> str:
        chats = "" if self.chat_template else ", no chat template"
        return f"<Tokenizer {self.name!r}: {type(self.backend).__name__}{chats}>"

    @classmethod
    def load(cls, folder_or_name: str, *, revision: str | None = None) -> Tokenizer | None:
        """Load the tokenizer of a folder or hub name; None if the model has none.

        Raises:
            ModelNotFoundError: no such folder or hub name.
            ModelError: there are tokenizer files, but they cannot be read.
        """
        name = str(folder_or_name)
        folder = Path(name).expanduser()
        local = folder.is_dir()
        if local and not any((folder / file).is_file() for file in _TOKENIZER_FILES):
            return None
        is_path = name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1
        if not local and (folder.exists() or is_path):
            raise ModelNotFoundError(f"no such folder: {name!r}; give the folder of a model or a hub name")
        from transformers import AutoTokenizer

        try:
            backend = AutoTokenizer.from_pretrained(
                str(folder) if local else name, revision=revision, trust_remote_code=False, local_files_only=local
            )
        except ImportError as error:
            missing = f"the tokenizer of {name!r} needs a package that is missing: {first_line(error)}"
            raise ModelError(missing) from error
        except Exception as error:  # tokenizers raises bare Exception for a broken file
            if not local and not _is_cached(name, revision, error):
                return None
            raise ModelError(
                f"the tokenizer of {name!r} cannot be read ({first_line(error)}); fetch its files again, "
                "or remove them to go on with token ids"
            ) from error
        return cls(backend, name)

    def encode(self, text: str) -> list[int]:
        """Encode a text with the special tokens around it (BOS for Llama); a `PromptError` for a lone surrogate."""
        refuse_half_characters(text)
        return list(self.backend(text, verbose=False).input_ids)

    def plain_ids(self, text: str) -> tuple[int, ...]:
        """Encode a part of a text, without special tokens; a `PromptError` for a lone surrogate."""
        refuse_half_characters(text)
        return tuple(self.backend(text, verbose=False, add_special_tokens=False).input_ids)

    def least_tokens(self, text: str) -> int:
        """Lower bound of a text's tokens, from its bytes; 0 if unknown for this tokenizer."""
        most, left_out = self._token_bytes
        return -(-len(text.encode(errors="replace").translate(None, left_out)) // most) if most else 0

    @cached_property
    def _token_bytes(self) -> tuple[int, bytes]:
        """The most bytes of a text that become one token, 0 if unlimited or unknown, and the bytes that become none."""
        from transformers import PreTrainedTokenizerBase

        is_usual = type(self.backend).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template
        if not (getattr(self.backend, "is_fast", False) and is_usual):
            return 0, b""
        tokenizer, words = self.backend.backend_tokenizer, self.backend.get_vocab()
        model = json.loads(tokenizer.model.__getstate__())
        steps = _steps(tokenizer.normalizer) + _steps(tokenizer.pre_tokenizer)
        by_bytes = any(step["type"] == "ByteLevel" for step in steps)
        alphabet = byte_letters() if by_bytes else {f"<0x{byte:02X}>": byte for byte in range(256)}
        left_out = bytes(byte for letter, byte in alphabet.items() if letter not in words)
        added = list(self.backend.added_tokens_decoder.values())
        if (
            model["type"] != "BPE"
            or not (by_bytes or (model["byte_fallback"] and not left_out))
            or not all(map(_keeps_all, steps))
            or any(token.lstrip or token.rstrip for token in added)
        ):
            return 0, b""
        longest = max(map(len, words)) if by_bytes else max(len(word.encode()) for word in words)
        longest = max(longest, *(len(token.content.encode()) for token in added), 1)
        return longest * (_COMPOSED if any(step["type"] == "NFC" for step in steps) else 1), left_out

    def word_ids(self, text: str) -> list[tuple[int, ...]]:
        """Encode a word inside a text, without special tokens: as it is, and after a space.

        The second only if it has as many ids and another first one; otherwise words are not usually written so.
        """
        word = text.lstrip(" ")
        if not word.strip():  # only whitespace
            return [ids] if (ids := self.plain_ids(text)) else []
        bare, spaced = self.plain_ids(word), self.plain_ids(" " + word)
        found = [bare, spaced] if len(spaced) == len(bare) and spaced[:1] != bare[:1] else [bare]
        return [ids for ids in found if ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids; special tokens are dropped and spaces stay as the model wrote them."""
        return self._decoder(list(ids))

    def shown_text(self, ids: Sequence[int]) -> str:
        """Decode ids, with special tokens by their names."""
        return str(self.backend.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @cached_property
    def whole_tokens(self) -> Mapping[str, int]:
        """Ids of the tokens that are matched as a whole before a text is split; grammars refer to them by id."""
        added = self.backend.added_tokens_decoder.items()
        # llguidance treats a token in angle brackets as a control token, whatever the tokenizer says.
        return {
            token.content: number
            for number, token in added
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }

    @cached_property
    def _decoder(self) -> Callable[[list[int]], str]:
        """The library's own decoder if transformers only passes ids to it, because it is called for every token."""
        from transformers import PreTrainedTokenizerFast

        kind = type(self.backend)
        if isinstance(self.backend, PreTrainedTokenizerFast) and all(
            getattr(kind, name) is getattr(PreTrainedTokenizerFast, name) for name in ("decode", "_decode")
        ):
            decode = self.backend.backend_tokenizer.decode
            return lambda ids: str(decode(ids, skip_special_tokens=True))
        return lambda ids: str(self.backend.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    @property
    def chat_template(self) -> str:
        """The text of the model's chat template; "" without one. Several templates are joined."""
        template = getattr(self.backend, "chat_template", None)
        return "\n".join(template.values()) if isinstance(template, Mapping) else template or ""

    def chat(self, messages: Sequence[Mapping[str, Any]], **how: Unpack[ChatOptions]) -> list[int]:
        """Convert a conversation to ids by the model's chat template, up to the beginning of its answer.

        Raises:
            PromptError: the model has no chat template, or its template rejects these messages; or they spell a control
                token that cannot be kept as text.
            OptionError: a variable has the name of an argument that is not the template's.
        """
        marked, most = self._marked(messages, how), how.get("most_tokens")

        def refuse(text: str) -> None:
            if most is not None and (least := self.least_tokens(text)) >= most:
                raise PromptLengthError(
                    f"the conversation has {least} tokens or more, and this model's context is {most}; shorten it"
                )

        if marked is None and most is not None and self._token_bytes[0]:
            text = str(self._templated(messages, how, tokenize=False))
            refuse(text)
            return list(self.plain_ids(text))
        if marked is None:
            return list(map(int, self._templated(messages, how, tokenize=True)))
        how["tools"], how["variables"] = marked.tools, marked.variables
        text = self._templated(marked.messages, how, tokenize=False)
        return self._control_tokens(how.get("template")).ids(text, marked, refuse)

    def chat_text(self, messages: Sequence[Mapping[str, Any]], **how: Unpack[ChatOptions]) -> str:
        """The text from which `chat` makes ids; with the same arguments and errors.

        Also a `PromptError` if messages spell a control token, which in a text looks like the template's own.
        """
        marked = self._marked(messages, how)
        if marked is not None:
            place, token = marked.found
            refusal = f"{place} spells {token!r}, a control token of {self.name!r}, which cannot be kept as text here"
            raise PromptError(f"{refusal}; leave it out")
        return str(self._templated(messages, how, tokenize=False))

    def conversation_text(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """A whole conversation as the chat template writes it, up to its last answer, for training.

        Control tokens spelled in messages are not distinguished from the template's own. A `PromptError` as of `chat`.
        """
        return str(self._templated(messages, {"tools": tools}, tokenize=False, begin=False))

    def _marked(self, messages: Sequence[Mapping[str, Any]], how: ChatOptions) -> MarkedChat | None:
        if how.get("trust_control_tokens"):
            return None
        try:
            control = self._control_tokens(how.get("template"))
            return control.marked(messages, how.get("tools"), how.get("variables") or {})
        except (TypeError, UnicodeEncodeError) as error:
            raise PromptError(f"a message has half a character (a lone surrogate): {first_line(error)}") from error
        except RecursionError as error:
            raise PromptError(_TOO_DEEP) from error

    def _control_tokens(self, template: str | None) -> ControlTokens:
        if template not in self._control:
            written = (template or self.chat_template) + "".join(self._conversation(template))
            self._control[template] = ControlTokens(self.backend, self.name, written)
        return self._control[template]

    def turn_end(self, template: str | None = None) -> int | None:
        """The special token that ends an assistant's turn, at the end of a chat and inside it; None if none does."""
        texts = self._conversation(template)
        following = [self._control_tokens(template).special_in(text.rpartition(_WORD)[2]) for text in texts]
        both = [pair[0] for pair in takewhile(lambda pair: len(set(pair)) == 1, zip(*following, strict=False))]
        return both[-1] if len(texts) == 2 and 0 < len(both) <= _MOST_CLOSING else None

    def _conversation(self, template: str | None) -> list[str]:
        from truedraft.text.templates import TooMuchError

        talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": _WORD}]
        found = []
        for messages in (talk, [*talk, {"role": "user", "content": "hi"}]):
            try:
                found.append(str(self._templated(messages, {"template": template}, tokenize=False, begin=False)))
            except PromptError as error:
                if isinstance(error.__cause__, TooMuchError):  # which is slow, so not a second time
                    break
        return found

    def _templated(
        self, messages: Sequence[Mapping[str, Any]], how: ChatOptions, *, tokenize: bool, begin: bool = True
    ) -> Any:
        tools, template, variables = how.get("tools"), how.get("template"), how.get("variables")
        continues = how.get("continues", False)
        if template is None and not self.chat_template:
            raise PromptError(f"{self.name!r} has no chat template; give plain text, or a model tuned for chat")
        from truedraft.text.templates import rendered

        more = dict(variables or {})
        if taken := {"messages", *signature(self.backend.apply_chat_template).parameters} & more.keys():
            message = f"may not hold {min(taken)!r}, a word of the tokenizer's own"
            raise OptionError(message, field="chat_template_kwargs")
        if not continues and any(message.get("content", "") is None for message in messages):
            # The library drops null, which some templates need; variables keep it.
            more[_WITH_NULL] = [dict(message) for message in messages]
            template = "{%- set messages = " + _WITH_NULL + " %}" + self.backend.get_chat_template(template, tools)
        try:
            return rendered(
                self.backend,
                [dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                chat_template=template,
                add_generation_prompt=begin and not continues,
                continue_final_message=continues,
                tokenize=tokenize,
                return_dict=False,
                **more,
            )
        except RecursionError as error:
            raise PromptError(_TOO_DEEP) from error
        except Exception as error:  # a template is untrusted code and may raise anything
            for text in texts_in([messages, tools, variables]):
                refuse_half_characters(text)
            refusal = f"the chat template of {self.name!r} refuses these messages: {first_line(error)}"
            raise PromptError(refusal) from error

    def token_text(self, token: int) -> str:
        """The text of one token inside a text; for a special token, which has no text, its name."""
        if token in self.skipped_ids:
            return str(self.backend.convert_ids_to_tokens(token))
        before, both = self.decode([self._letter]), self.decode([self._letter, token])
        return both.removeprefix(before)

    def texts_holding(self, character: str) -> Mapping[int, str]:
        """By id the text inside a text of all tokens that contain a character."""
        if character not in self._holding:
            # Byte-level vocabularies spell non-ASCII characters by their bytes.
            words = self.backend.get_vocab().items()
            ids = [token for word, token in words if not character.isascii() or character in word]
            texts = {token: self.token_text(token) for token in ids}
            self._holding[character] = {token: text for token, text in texts.items() if character in text}
        return self._holding[character]

    @cached_property
    def _letter(self) -> int:
        """A token that does not change the text of the token after it."""
        return self.plain_ids("a")[-1]

    @property
    def vocab_size(self) -> int:
        """The largest id plus one, added tokens included; a model may pad its logits beyond it."""
        return self._about_ids[0]

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text by this tokenizer; the model's generation config may name more."""
        eos = self.backend.eos_token_id
        if eos is None:
            return ()
        return tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)

    @cached_property
    def fingerprint(self) -> str:
        """A hash, equal for tokenizers with the same texts of ids and the same merge rules."""
        return Vocabulary.of(self.backend).fingerprint

    def same_vocabulary(self, other: Tokenizer) -> bool:
        """Whether both use the same ids, whatever size their models pad the vocabulary to."""
        if self is other or (self.backend.is_fast and other.backend.is_fast and self._as_file == other._as_file):
            return True  # reading a vocabulary takes ten times as long
        return self.fingerprint == other.fingerprint

    @cached_property
    def _as_file(self) -> bytes:
        """A hash of the serialized tokenizer, which has 30 MB for a vocabulary of 262,144."""
        return hashlib.sha256(self.backend.backend_tokenizer.to_str().encode()).digest()

    def difference(self, other: Tokenizer) -> str:
        """One sentence on where the vocabularies first differ; empty if they do not."""
        return Vocabulary.of(self.backend).difference(Vocabulary.of(other.backend), self.name, other.name)

    @property
    def skipped_ids(self) -> frozenset[int]:
        """Ids below `vocab_size` without text: special tokens, and unused numbers."""
        return self._about_ids[1]

    @property
    def byte_values(self) -> Mapping[int, int]:
        """By id the byte of each byte token (`<0x0A>`), for tokenizers with byte fallback."""
        return self._about_ids[2]

    @cached_property
    def _about_ids(self) -> tuple[int, frozenset[int], dict[int, int]]:
        """Vocabulary size, ids without text and byte values; cached, because reading large ones takes half a second."""
        vocabulary = Vocabulary.without_rules(self.backend)
        unused = frozenset(range(len(vocabulary))) - vocabulary.tokens.keys()
        return len(vocabulary), vocabulary.special | unused, vocabulary.byte_values


def _steps(part: Any) -> list[dict[str, Any]]:
    described: dict[str, Any] = {"type": "Sequence"} if part is None else json.loads(part.__getstate__())
    inner = described.get("normalizers", described.get("pretokenizers", ()))
    return list(inner) if described["type"] == "Sequence" else [described]


def _keeps_all(step: Mapping[str, Any]) -> bool:
    """Whether a step shortens no text, except by composing letters."""
    kind = step["type"]
    if kind == "Replace":
        pattern = step["pattern"].get("String")
        return pattern is not None and len(pattern.encode()) <= len(step["content"].encode())
    return kind in ("Prepend", "NFC", "ByteLevel", "Digits", "Metaspace") or (
        kind == "Split" and step["behavior"] != "Removed"
    )


@cache
def byte_letters() -> Mapping[str, int]:
    """By letter of byte-level vocabularies its byte: printable bytes are themselves, others are letters beyond 255."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in shown)
    return {chr(byte): byte for byte in shown} | {chr(256 + number): byte for number, byte in enumerate(others)}


def _is_cached(name: str, revision: str | None, error: Exception) -> bool:
    """Whether any tokenizer file of a hub name is here; a `ModelNotFoundError` if the hub has no such name."""
    from huggingface_hub import errors, try_to_load_from_cache

    missing = (
        errors.HFValidationError,
        errors.LocalEntryNotFoundError,
        errors.OfflineModeIsEnabled,
        errors.RepositoryNotFoundError,
        errors.RevisionNotFoundError,
    )
    if isinstance(error, missing) or isinstance(error.__cause__, missing):
        raise ModelNotFoundError(
            f"no folder and no reachable hub model is called {name!r} ({first_line(error)}); "
            "check the name, the network, or give a local folder"
        ) from error
    return any(isinstance(try_to_load_from_cache(name, file, revision=revision), str) for file in _TOKENIZER_FILES)


@dataclass(frozen=True)
class Vocabulary:
    """The ids of one tokenizer.

    Properties that do not change the meaning of ids are left out: which token begins, ends or pads a text (a base model
    and its chat-tuned sibling differ there), templates, truncation, and how text is split before merging.
    """

    tokens: dict[int, str]
    kind: str
    rules: tuple[str, ...]  # in order: merges, or the scores of the pieces
    added: frozenset[int]  # matched as a whole before merging, special ones included
    special: frozenset[int]
    byte_fallback: bool  # whether tokens such as `<0x0A>` are decoded as bytes

    @classmethod
    def of(cls, backend: Any) -> Vocabulary:
        ids = cls.without_rules(backend)
        if not backend.is_fast:  # its rules have another format; only its ids are compared
            return ids
        kind, rules = _rules(json.loads(backend.backend_tokenizer.to_str())["model"])
        return replace(ids, kind=kind, rules=rules)

    @classmethod
    def without_rules(cls, backend: Any) -> Vocabulary:
        tokens = {number: token for token, number in backend.get_vocab().items()}
        added = {number: token for number, token in backend.added_tokens_decoder.items() if number >= 0}
        tokens.update({number: token.content for number, token in added.items()})
        special = {number for number, token in added.items() if token.special}
        if not backend.is_fast:
            special |= set(backend.all_special_ids)
            fallback = any(_BYTE_TOKEN.fullmatch(token) for token in tokens.values())
            return cls(tokens, "slow", (), frozenset(added), frozenset(special), fallback)
        decoder = backend.backend_tokenizer.decoder
        fallback = decoder is not None and holds_type(json.loads(decoder.__getstate__()), "ByteFallback")
        return cls(tokens, "", (), frozenset(added), frozenset(special), fallback)

    def __len__(self) -> int:
        return max(self.tokens, default=-1) + 1

    @property
    def byte_values(self) -> dict[int, int]:
        if not self.byte_fallback:
            return {}
        return {number: int(token[3:5], 16) for number, token in self.tokens.items() if _BYTE_TOKEN.fullmatch(token)}

    @property
    def fingerprint(self) -> str:
        """A hash over tokens, kind, rules and added tokens, as hexadecimal digits."""
        digest = hashlib.sha256(f"truedraft vocabulary 1\n{self.kind}\n".encode())
        for part in (sorted(self.tokens.items()), self.rules, sorted(self.added)):
            digest.update(json.dumps(part).encode() + b"\n")
        return digest.hexdigest()

    def difference(self, other: Vocabulary, name: str, other_name: str) -> str:
        for number in sorted(self.tokens.keys() | other.tokens.keys()):
            mine, theirs = self.tokens.get(number), other.tokens.get(number)
            if mine != theirs:
                own, its = ("absent" if token is None else repr(token) for token in (mine, theirs))
                return f"id {number} is {own} in {name!r} and {its} in {other_name!r}"
        if self.kind != other.kind:
            return f"all ids agree, but {name!r} is a {self.kind} tokenizer and {other_name!r} a {other.kind} one"
        for number in sorted(self.added ^ other.added):
            whole, cut = (name, other_name) if number in self.added else (other_name, name)
            return f"id {number} ({self.tokens[number]!r}) is always one token in {whole!r} and may be cut in {cut!r}"
        for place, (mine, theirs) in enumerate(zip(self.rules, other.rules, strict=False)):
            if mine != theirs:
                return f"all ids agree, but rule {place} is {mine!r} in {name!r} and {theirs!r} in {other_name!r}"
        if len(self.rules) != len(other.rules):
            return f"all ids agree, but {name!r} has {len(self.rules)} rules and {other_name!r} has {len(other.rules)}"
        return ""


def _rules(model: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """The kind and the rules of a model, in one format for all versions of the file format."""
    kind = str(model.get("type") or ("BPE" if "merges" in model else "WordLevel"))
    if kind == "BPE":  # a merge is "a b" in old files and ["a", "b"] in new ones
        merges = model.get("merges") or []
        return kind, tuple(merge if isinstance(merge, str) else " ".join(merge) for merge in merges)
    if kind == "Unigram":
        return kind, tuple(f"{piece} {score!r}" for piece, score in model["vocab"])
    return kind, ()


def holds_type(described: object, kind: str) -> bool:
    """Whether a part of a tokenizer, or a part inside it, has the type."""
    if isinstance(described, dict):
        return described.get("type") == kind or any(holds_type(part, kind) for part in described.values())
    return isinstance(described, list) and any(holds_type(part, kind) for part in described)
