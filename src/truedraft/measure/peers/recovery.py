"""Token ids of a server's answer, for scoring: given, looked up by name, or found by encoding; otherwise an error.

Redundant information must agree: the prompt ids that the server read with those that were sent, ids with their text,
and the number of tokens with the server's count. Answers with ids that were found by encoding are a biased sample: an
answer is lost if its tokens are not the encoding of its text. Such replies are marked unsure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from truedraft.errors import PeerError
from truedraft.measure.peers.asking import Question, Reply
from truedraft.text import REPLACEMENT, Tokenizer

_BY_TEXT = "the server hides ids: these are of its text, and another split into tokens makes the same text"


@dataclass(frozen=True, slots=True)
class ReceivedAnswer:
    """A server's answer, as received; None is what it does not give."""

    text: str | None
    finish_reason: str  # in OpenAI's words, or one of the server's own
    token_ids: tuple[int, ...] | None = None  # of the answer, including the one that ended it
    names: tuple[str | int, ...] | None = None  # of its tokens, as in logprobs: their text, or their id as a number
    logprobs: tuple[float, ...] | None = None
    top: tuple[Mapping[str | int, float], ...] | None = None  # the likeliest tokens by name, for each of `names`
    prompt_ids: tuple[int, ...] | None = None
    prompt_count: int | None = None
    count: int | None = None
    model: str | None = None


class Recovery:
    """Converts answers to replies, with the tokenizer of the model that scores them; None where there are only ids.

    By default the number of ids, and those that end an answer, are the tokenizer's.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int | None = None, eos_token_ids: Collection[int] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = tokenizer.vocab_size if vocab_size is None and tokenizer is not None else vocab_size
        known = () if tokenizer is None else tokenizer.eos_token_ids
        self._eos = frozenset(known if eos_token_ids is None else eos_token_ids)

    def prompt_text(self, prompt: Sequence[int]) -> str:
        """The text of prompt ids, for a server that takes only text.

        Raises PeerError if that does not encode to the same ids.
        """
        if self._tokenizer is None:
            raise PeerError("this server takes only text, and there is no tokenizer to make some of token ids")
        text = self._tokenizer.decode(prompt)
        if tuple(self._tokenizer.encode(text)) != tuple(prompt):
            raise PeerError("this server takes only text, and the prompt's text encodes to other token ids")
        return text

    def reply(self, answer: ReceivedAnswer, question: Question) -> Reply:
        """The server's answer, with token ids; PeerError if ids cannot be recovered, or contradict the rest of it."""
        self._check_prompt(answer, question)
        ids, unsure = self._ids(answer, question)
        logprobs = answer.logprobs
        if logprobs is not None and not (len(logprobs) == len(ids) and all(map(math.isfinite, logprobs))):
            logprobs = None  # a tolerance computed from NaN would accept everything
        top = None
        if logprobs is not None and answer.top is not None and len(answer.top) == len(ids):
            top = tuple(self._by_id(each) for each in answer.top)
        kept = self.without_end(ids, answer.finish_reason, question)
        return Reply(
            ids[:kept],
            answer.text,
            answer.finish_reason,
            None if logprobs is None else logprobs[:kept],
            None if top is None else top[:kept],
            unsure,
        )

    def without_end(self, ids: Sequence[int], finish_reason: str, question: Question) -> int:
        ends = set(question.params.stop_token_ids) | (set() if question.params.ignore_eos else self._eos)
        return len(ids) - (finish_reason == "stop" and bool(ids) and ids[-1] in ends)

    def check_ids(self, ids: Sequence[int]) -> None:
        """Refuse ids outside the vocabulary; PeerError names the first one."""
        size = self._vocab_size
        wrong = next((token for token in ids if token < 0 or (size is not None and token >= size)), None)
        if wrong is not None:
            known = "no model has such" if size is None else f"outside a vocabulary of {size}"
            raise PeerError(f"it answered token id {wrong}, {known}: its tokenizer is another one")

    def _check_prompt(self, answer: ReceivedAnswer, question: Question) -> None:
        sent, why = question.prompt, "its tokenizer is another one, or it adds"
        if answer.prompt_ids is not None and answer.prompt_ids != sent:
            raise PeerError(
                f"it read {len(answer.prompt_ids)} token ids that are not the {len(sent)} of the prompt: {why} tokens"
            )
        if answer.prompt_count and answer.prompt_count != len(sent):
            raise PeerError(
                f"it counts {answer.prompt_count} tokens in a prompt of {len(sent)}: {why} or cuts off tokens"
            )

    def _ids(self, answer: ReceivedAnswer, question: Question) -> tuple[tuple[int, ...], str]:
        if answer.token_ids is not None:
            self.check_ids(answer.token_ids)
            kept = self.without_end(answer.token_ids, answer.finish_reason, question)
            readings = {answer.token_ids, answer.token_ids[:kept]}  # the text may include the stop token or not
            if not any(self._says(ids, answer, question) for ids in readings):
                raise PeerError(
                    f"its token ids do not mean the text that it wrote, {repr(answer.text)[:60]}: its tokenizer differs"
                )
            return answer.token_ids, ""
        if answer.names is not None:
            named = tuple(token for name in answer.names if (token := self._id(name)) is not None)
            self.check_ids(named)
            if len(named) == len(answer.names) and self._says(named, answer, question):
                return named, ""
        return self._encoded(answer, question), _BY_TEXT

    def _id(self, name: str | int) -> int | None:
        return name if isinstance(name, int) else self._ids_by_name.get(name)

    def _by_id(self, named: Mapping[str | int, float]) -> dict[int, float]:
        pairs = ((self._id(name), value) for name, value in named.items())
        return {token: value for token, value in pairs if token is not None}

    @cached_property
    def _ids_by_name(self) -> Mapping[str, int]:
        tokenizer = self._tokenizer
        texts = [] if tokenizer is None else [tokenizer.token_text(token) for token in range(tokenizer.vocab_size)]
        counts = Counter(texts)
        return {text: token for token, text in enumerate(texts) if counts[text] == 1 and REPLACEMENT not in text}

    def _says(self, ids: tuple[int, ...], answer: ReceivedAnswer, question: Question) -> bool:
        """Whether ids decode to the answer's text, up to bytes that form no character, and up to a stop text."""
        if self._tokenizer is None or answer.text is None:
            return True
        before = self._tokenizer.decode(question.prompt)
        within = self._tokenizer.decode((*question.prompt, *ids))
        readings = [self._tokenizer.decode(ids)]
        if within.startswith(before.rstrip(REPLACEMENT)):
            readings.append(within[len(before) :])
        cut = bool(question.params.stop) and answer.finish_reason == "stop"
        return any(_same(reading, answer.text, cut) for reading in readings)

    def _encoded(self, answer: ReceivedAnswer, question: Question) -> tuple[int, ...]:
        hides = "it hides the token ids of its answer"
        if self._tokenizer is None or answer.text is None:
            raise PeerError(f"{hides}, and there is no tokenizer, or no text, to find them by")
        if not answer.text:
            return ()
        if REPLACEMENT in answer.text:
            raise PeerError(f"{hides}, whose text has half a character, so they are unknown")
        before = self._tokenizer.decode(question.prompt)
        both = tuple(self._tokenizer.encode(before + answer.text))
        start = len(question.prompt)
        if both[:start] != question.prompt or self._tokenizer.decode(both) != before + answer.text:
            raise PeerError(f"{hides}, and its text merges with the prompt's when encoded")
        ids = both[start:]
        ended = answer.finish_reason == "stop"
        if answer.count is not None and answer.count not in (len(ids), len(ids) + ended):
            raise PeerError(f"{hides}: {answer.count} tokens by its count, {len(ids)} when encoded")
        return ids


def _same(reading: str, text: str, cut: bool) -> bool:
    whole, half, _ = reading.partition(REPLACEMENT)
    if half:
        return text.startswith(whole) or (cut and whole.startswith(text.partition(REPLACEMENT)[0]))
    return whole == text or (cut and whole.startswith(text))
