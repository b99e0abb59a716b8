"""A model's tokenizer: text to ids and back, chat templates, and whether two models share one vocabulary."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from inspect import signature
from itertools import takewhile
from pathlib import Path
from typing import Any, TypedDict, Unpack

from truedraft.errors import ModelError, ModelNotFoundError, OptionError, PromptError, PromptLengthError, first_line
from truedraft.text.control_tokens import ControlTokens, MarkedChat, refuse_half_characters, texts_in
from truedraft.text.vocabulary import Vocabulary

# A folder or repository with none of these has no tokenizer: ids go in and out. A file outside this list
# (a SentencePiece model under a name of its own, say) is named by tokenizer_config.json, which is in it.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
_WORD = "word"  # that an assistant says where it is looked at what a template writes behind it
_MOST_CLOSING = (
    2  # special tokens that close a turn: more are parts of a larger form, of which the last may open a turn
)


_WITH_NULL = "messages_with_null"
_COMPOSED = 3
"""Bytes of UTF-8 that one byte of a text in NFC stands for at most."""
_TOO_DEEP = "messages, tools or chat_template_kwargs are nested too deeply; make them flatter"


class ChatOptions(TypedDict, total=False):
    """How a chat template is used.

    Attributes:
        tools: functions that the model may call, for templates that know such.
        template: in place of the model's own.
        variables: what else the template knows.
        continues: whether the answer goes on with the last message; else it is a new one.
        most_tokens: of the chat; what is surely longer is refused before it is tokenised.
        trust_control_tokens: read control tokens that messages spell as the tokens; otherwise they stay text.
    """

    tools: Sequence[Mapping[str, Any]] | None
    template: str | None
    variables: Mapping[str, Any] | None
    continues: bool
    most_tokens: int
    trust_control_tokens: bool


class Tokenizer:
    """A Hugging Face tokenizer with the few calls that this package needs.

    Args:
        backend: the tokenizer from transformers, fast or slow.
        name: what messages call it.
    """

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
        """Load the tokenizer of a folder or hub name; None where the model comes without one.

        Raises:
            ModelNotFoundError: no such folder or hub name.
            ModelError: there are tokenizer files, but they cannot be read.
        """
        name = str(folder_or_name)
        folder = Path(name).expanduser()
        local = folder.is_dir()
        if local and not any((folder / file).is_file() for file in _TOKENIZER_FILES):
            return None
        if not local and (folder.exists() or _looks_like_a_path(name)):
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
            if not local:
                _refuse_missing_name(name, error)
                if not _has_cached_files(name, revision):
                    return None
            raise ModelError(
                f"the tokenizer of {name!r} cannot be read ({first_line(error)}); fetch its files again, "
                "or remove them to go on with token ids"
            ) from error
        return cls(backend, name)

    def encode(self, text: str) -> list[int]:
        """Turn text into ids, with the special tokens that the model expects around it (BOS for Llama).

        Raises:
            PromptError: the text holds half a character.
        """
        return list(self._ids(text))

    def plain_ids(self, text: str) -> tuple[int, ...]:
        """The ids of a part of a text, without special tokens.

        Raises:
            PromptError: the text holds half a character.
        """
        return tuple(self._ids(text, add_special_tokens=False))

    def _ids(self, text: str, **how: bool) -> Sequence[int]:
        refuse_half_characters(text)
        return self.backend(text, verbose=False, **how).input_ids

    def least_tokens(self, text: str) -> int:
        """How many tokens a text has at least, by its bytes; 0 where that is not known of this tokenizer."""
        most, left_out = self._token_bytes
        return -(-len(text.encode(errors="replace").translate(None, left_out)) // most) if most else 0

    @cached_property
    def _token_bytes(self) -> tuple[int, bytes]:
        """Most bytes of a text that become one token, and those bytes that become none.

        The first is 0 where it may be any number, or is not known. Known are tokenizers that write texts by bytes.
        """
        from transformers import PreTrainedTokenizerBase

        is_usual = type(self.backend).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template
        if not (getattr(self.backend, "is_fast", False) and is_usual):
            return 0, b""
        tokenizer, words = self.backend.backend_tokenizer, self.backend.get_vocab()
        model = json.loads(tokenizer.model.__getstate__())
        steps = _steps(tokenizer.normalizer) + _steps(tokenizer.pre_tokenizer)
        by_bytes = any(step["type"] == "ByteLevel" for step in steps)
        alphabet = _byte_letters() if by_bytes else {f"<0x{byte:02X}>": byte for byte in range(256)}
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
        """The ids of a word in the middle of a text, without special tokens: as it is, and behind a space.

        The second where it is as long and begins with another token; others are not how a word is usually written.
        """
        word = text.lstrip(" ")
        if not word.strip():  # white space alone
            return [ids] if (ids := self.plain_ids(text)) else []
        bare, spaced = self.plain_ids(word), self.plain_ids(" " + word)
        found = [bare, spaced] if len(spaced) == len(bare) and spaced[:1] != bare[:1] else [bare]
        return [ids for ids in found if ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Turn ids into text; special tokens are left out and spaces stay as the model wrote them."""
        return self._decoder(list(ids))

    def shown_text(self, ids: Sequence[int]) -> str:
        """Turn ids into text, special tokens by their names."""
        return str(self.backend.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @cached_property
    def whole_tokens(self) -> Mapping[str, int]:
        """The ids of tokens that are matched as a whole before a text is cut, and that grammars know by their ids."""
        added = self.backend.added_tokens_decoder.items()
        # llguidance takes a token in angle brackets for a control token, whatever the tokenizer says.
        return {
            token.content: number
            for number, token in added
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }

    @cached_property
    def _decoder(self) -> Callable[[list[int]], str]:
        """The library's own decoder where transformers only passes ids on to it; that is called for every token."""
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
        """The model's chat template, as text; "" where it has none. Of several, those of all kinds."""
        template = getattr(self.backend, "chat_template", None)
        return "\n".join(template.values()) if isinstance(template, Mapping) else template or ""

    def chat(self, messages: Sequence[Mapping[str, Any]], **how: Unpack[ChatOptions]) -> list[int]:
        """Turn a conversation into ids by the model's chat template, up to where its answer begins.

        Args:
            messages: with role and content each.
            how: see `ChatOptions`.

        Raises:
            PromptError: the model has no chat template, or its template refuses these messages; or they spell a control
                token that cannot be kept as text.
            OptionError: a variable has the name of something that is not the template's.
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
        """The text of which `chat` makes ids; arguments and errors are the same.

        Raises:
            PromptError: messages spell a control token, which no text tells from the template's own.
        """
        marked = self._marked(messages, how)
        if marked is not None:
            place, token = marked.found
            raise PromptError(
                f"{place} spells {token!r}, a control token of {self.name!r}, which cannot be kept as text here; "
                "leave it out"
            )
        return str(self._templated(messages, how, tokenize=False))

    def conversation_text(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """A whole conversation as the chat template writes it, to its last answer, to be trained on.

        Control tokens that messages spell are not told from the template's own.

        Raises:
            PromptError: the model has no chat template, or its template refuses these messages.
        """
        return str(self._templated(messages, {"tools": tools}, tokenize=False, begin=False))

    def _marked(self, messages: Sequence[Mapping[str, Any]], how: ChatOptions) -> MarkedChat | None:
        """The chat with marks around the control tokens that it spells; None where it spells none, or may."""
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
        """The special token with which a chat template closes an assistant's turn; None where none is seen to.

        Args:
            template: in place of the model's own.

        It stands behind the answer wherever that stands, so tokens that open the next turn, or end the whole text, are
        told from it.
        """
        texts = self._conversation(template)
        behind = [self._control_tokens(template).special_in(text.rpartition(_WORD)[2]) for text in texts]
        both = [pair[0] for pair in takewhile(lambda pair: len(set(pair)) == 1, zip(*behind, strict=False))]
        return both[-1] if len(texts) == 2 and 0 < len(both) <= _MOST_CLOSING else None

    def _conversation(self, template: str | None) -> list[str]:
        """A few words of a user and of an assistant as the template writes them, without and with an answer to them."""
        from truedraft.text.templates import TooMuchError

        talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": _WORD}]
        found = []
        for messages in (talk, [*talk, {"role": "user", "content": "hi"}]):
            try:
                found.append(str(self._templated(messages, {"template": template}, tokenize=False, begin=False)))
            except PromptError as error:
                if isinstance(error.__cause__, TooMuchError):  # which takes its time
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
            raise OptionError(
                f"may not hold {min(taken)!r}, a word of the tokenizer's own", field="chat_template_kwargs"
            )
        if not continues and any(message.get("content", "") is None for message in messages):
            # The library leaves null out, which some templates ask for; variables keep it.
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
        except Exception as error:  # a template is a program of a stranger's
            for text in texts_in([messages, tools, variables]):
                refuse_half_characters(text)
            told = f"the chat template of {self.name!r} refuses these messages: {first_line(error)}"
            raise PromptError(told) from error

    def token_text(self, token: int) -> str:
        """What one token writes in the middle of a text; the name of a special token, which writes nothing."""
        if token in self.skipped_ids:
            return str(self.backend.convert_ids_to_tokens(token))
        before, both = self.decode([self._letter]), self.decode([self._letter, token])
        return both.removeprefix(before)

    def texts_holding(self, character: str) -> Mapping[int, str]:
        """By id what each token writes in the middle of a text, of those that write a character."""
        if character not in self._holding:
            # Byte-level vocabularies spell other characters by their bytes.
            words = self.backend.get_vocab().items()
            ids = [token for word, token in words if not character.isascii() or character in word]
            texts = {token: self.token_text(token) for token in ids}
            self._holding[character] = {token: text for token, text in texts.items() if character in text}
        return self._holding[character]

    @cached_property
    def _letter(self) -> int:
        """A token before which no text changes."""
        return self.plain_ids("a")[-1]

    @property
    def vocab_size(self) -> int:
        """The largest id plus one, added tokens included; a model may pad its logits beyond it."""
        return self._about_ids[0]

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids with which this tokenizer ends a text; the model's generation config may name more."""
        eos = self.backend.eos_token_id
        if eos is None:
            return ()
        return tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)

    @cached_property
    def fingerprint(self) -> str:
        """A hash that is equal for tokenizers whose ids mean the same text and are merged by the same rules."""
        return Vocabulary.of(self.backend).fingerprint

    def same_vocabulary(self, other: Tokenizer) -> bool:
        """Whether both give and understand the same ids, whatever size their models pad the vocabulary to."""
        if self is other or (self.backend.is_fast and other.backend.is_fast and self._as_file == other._as_file):
            return True  # a vocabulary takes ten times as long to read
        return self.fingerprint == other.fingerprint

    @cached_property
    def _as_file(self) -> bytes:
        """A hash of it; of a vocabulary of 262,144 the text has 30 MB."""
        return hashlib.sha256(self.backend.backend_tokenizer.to_str().encode()).digest()

    def difference(self, other: Tokenizer) -> str:
        """Say in one sentence where the vocabularies first differ; empty if they do not."""
        return Vocabulary.of(self.backend).difference(Vocabulary.of(other.backend), self.name, other.name)

    @property
    def skipped_ids(self) -> frozenset[int]:
        """The ids below `vocab_size` that have no text: special ones, and numbers that no token has."""
        return self._about_ids[1]

    @property
    def byte_values(self) -> Mapping[int, int]:
        """The byte of each id that stands for one (`<0x0A>`), where the tokenizer falls back to bytes."""
        return self._about_ids[2]

    @cached_property
    def _about_ids(self) -> tuple[int, frozenset[int], dict[int, int]]:
        """Read once: a vocabulary of 262,144 takes half a second, and is not kept."""
        vocabulary = Vocabulary.without_rules(self.backend)
        return len(vocabulary), vocabulary.special | vocabulary.holes, vocabulary.byte_values


def _steps(part: Any) -> list[dict[str, Any]]:
    """What a normalizer or a pre-tokenizer does, one after another."""
    described: dict[str, Any] = {"type": "Sequence"} if part is None else json.loads(part.__getstate__())
    inner = described.get("normalizers", described.get("pretokenizers", ()))
    return list(inner) if described["type"] == "Sequence" else [described]


def _keeps_all(step: Mapping[str, Any]) -> bool:
    """Whether such a step makes no text shorter, but for letters that it composes."""
    kind = step["type"]
    if kind == "Replace":
        pattern = step["pattern"].get("String")
        return pattern is not None and len(pattern.encode()) <= len(step["content"].encode())
    return kind in ("Prepend", "NFC", "ByteLevel", "Digits", "Metaspace") or (
        kind == "Split" and step["behavior"] != "Removed"
    )


def _byte_letters() -> dict[str, int]:
    """By letter of a vocabulary of bytes, as GPT-2's, the byte that it stands for."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in shown)
    return {chr(byte): byte for byte in shown} | {chr(256 + number): byte for number, byte in enumerate(others)}


def _looks_like_a_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1


def _refuse_missing_name(name: str, error: Exception) -> None:
    """Raise if the hub has no such name or cannot be asked; OSError is all that transformers tells apart."""
    from huggingface_hub import errors

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


def _has_cached_files(name: str, revision: str | None) -> bool:
    """Whether the attempt to load left tokenizer files in the hub's cache: then they exist and are broken."""
    from huggingface_hub import try_to_load_from_cache

    return any(isinstance(try_to_load_from_cache(name, file, revision=revision), str) for file in _TOKENIZER_FILES)
