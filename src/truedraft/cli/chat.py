"""`truedraft chat`: chat in the terminal with a model in this process or on a server."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from truedraft.cli.failures import DONE, FAILED
from truedraft.cli.session import ReportOptions, StackOptions, check_rule, load_engine, with_model
from truedraft.cli.terminal import Terminal, visible, writer
from truedraft.core.params import TEXT_OPTIONS, SamplingParams
from truedraft.errors import OptionError, PeerError, TruedraftError, errors_about
from truedraft.measure.peers.calling import Caller
from truedraft.options import MachineOptions, changed_fields, flag, group, option, record_of

_HELP = """\
/reset  forget the conversation     /again  answer the last message once more
/system TEXT  instruct the model how to answer     /stats  what speculation did     /exit, /quit or Ctrl-D ends
Ctrl-C breaks off an answer."""
_KEY = "TRUEDRAFT_API_KEY"
_SILENCE_S = 600.0


@dataclass(frozen=True)
class ConversationOptions:
    """Options of the conversation."""

    url: str | None = option(
        None, f"Talk to the server at this address in place of a model here; its key is read from {_KEY}.", "URL"
    )
    system: str | None = option(None, "A system message: how the model is to answer.", "TEXT")
    trust_control_tokens: bool = flag("Read control tokens that messages spell, as <|im_end|>, as the tokens.")
    show_drafts: bool = flag("Colour each token by where it came from; brackets without colours.")


@dataclass(frozen=True)
class ChatOptions:
    """Options of `truedraft chat`."""

    talk: ConversationOptions = group("Talk")
    stack: StackOptions = group("Model and drafter", bare="model")
    sampling: SamplingParams = group("Answer", without=("stop", *TEXT_OPTIONS), max_tokens=512)
    report: ReportOptions = group("Report")
    machine: MachineOptions = group("Machine")


@dataclass(slots=True)
class _Turn:
    message: str
    text: str = ""
    seconds: float = 0.0
    tokens: int | None = None  # of the answer; this and the fields below are None if unknown
    tokens_per_call: float | None = None
    speedup: float | None = None  # estimated over plain decoding
    undrafted: str | None = None


@dataclass
class _Conversation:
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)  # but the system message
    turns: list[_Turn] = field(default_factory=list)
    failed: bool = False  # whether a message got no answer

    @property
    def whole(self) -> list[dict[str, str]]:
        return [*([] if self.system is None else [{"role": "system", "content": self.system}]), *self.messages]


def chat(options: ChatOptions) -> int:
    """Talk to a model; without a chat template it continues what you write."""
    terminal = Terminal()
    partner: _Local | _Server
    if options.talk.url is not None:
        partner = _Server(options.talk.url, _requested_model(options), options.sampling, terminal.note)
    else:
        partner = _Local(options, terminal)
    talk = _Conversation(options.talk.system)
    if _interactive():
        what = "Talk to" if partner.chats else "No chat template: what you write is continued by"
        terminal.note(f"{what} {visible(partner.name)}. /help lists the commands.")
    for line in _lines(terminal):
        if not _command(line, talk, terminal):
            _take_turn(line, talk, partner, terminal)
    status = FAILED if talk.failed and not _interactive() else DONE
    if options.report.json:
        turns = [asdict(each) for each in talk.turns]
        terminal.json({"command": "chat", "status": status, "model": partner.name, "turns": turns})
    return status


def _interactive() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _lines(terminal: Terminal) -> Iterator[str]:
    """The user's messages, line by line; a backslash at the end of a line continues it."""
    interactive = _interactive()
    while True:
        try:
            line = input("> " if interactive else "")
            while line.endswith("\\"):
                line = line[:-1] + "\n" + input("… " if interactive else "")
        except EOFError:
            terminal.end_line()
            return
        except KeyboardInterrupt:
            terminal.note("Ctrl-D ends the talk")
            continue
        if line.strip() in ("/exit", "/quit"):
            return
        if line.strip():
            yield line


def _command(line: str, talk: _Conversation, terminal: Terminal) -> bool:
    """Run a line that begins with /; False if the line is a message."""
    word, _, rest = line.strip().partition(" ")
    if word == "/help":
        terminal.note(_HELP)
    elif word == "/reset":
        talk.messages.clear()
        terminal.note("forgotten")
    elif word == "/system" and rest:
        talk.system = rest
        terminal.note("set")
    elif word == "/stats":
        terminal.note(_stats(talk.turns[-1]) if talk.turns else "nothing was answered yet")
    elif word == "/again":
        return False
    elif word.startswith("/") and word[1:].isalpha():
        terminal.note(f"there is no {word}; /help lists what there is")
    else:
        return False
    return True


def _take_turn(line: str, talk: _Conversation, partner: _Local | _Server, terminal: Terminal) -> None:
    before = list(talk.messages)
    if line.strip() == "/again":
        places = [place for place, each in enumerate(before) if each["role"] == "user"]
        if not places:
            terminal.note("there is no message yet")
            return
        line = before[places[-1]]["content"]
        del talk.messages[places[-1] :]
    turn = _Turn(line)
    talk.messages.append({"role": "user", "content": line})
    began = time.perf_counter()
    try:
        partner.answer(talk.whole, turn, terminal.write)
    except KeyboardInterrupt:
        terminal.end_line()
        terminal.note("broken off")
    except TruedraftError as error:
        terminal.end_line()
        terminal.note(f"error: {error}")
        talk.messages, talk.failed = before, True
        return
    turn.seconds = time.perf_counter() - began
    talk.messages.append({"role": "assistant", "content": turn.text})
    talk.turns.append(turn)
    terminal.end_line()
    terminal.note(_stats(turn))


def _stats(turn: _Turn) -> str:
    parts = [f"{'' if turn.tokens is None else f'{turn.tokens} tokens in '}{turn.seconds:.2f} s"]
    if turn.seconds > 0.0 and turn.tokens:
        parts.append(f"{turn.tokens / turn.seconds:.0f} a second")
    if turn.undrafted is not None:
        parts.append(turn.undrafted)
    elif turn.tokens_per_call is not None:
        parts.append(f"{turn.tokens_per_call:.2f} a target call")
    if turn.speedup is not None:
        parts.append(f"estimated {turn.speedup:.2f} times plain decoding")
    return ", ".join(parts)


class _Local:
    def __init__(self, options: ChatOptions, terminal: Terminal) -> None:
        self._params, self._talk, self._terminal = options.sampling, options.talk, terminal
        check_rule(options.stack.rule, options.sampling)
        self._engine = engine = load_engine(
            with_model(options.stack), options.machine, terminal.err, options.sampling, prefix_cache_bytes=1 << 28
        )
        self.name, tokenizer = engine.target.name, engine.target.tokenizer
        if tokenizer is None:
            raise OptionError(f"{self.name!r} has no tokenizer, so there is no text to talk in", field="model")
        self.chats, self._tokenizer = bool(tokenizer.chat_template), tokenizer  # else text is continued

    def answer(self, messages: list[dict[str, str]], turn: _Turn, show: Callable[[str], None]) -> None:
        """Answer the last message, or without a chat template continue the text of all messages."""
        from truedraft.cli.generate import stream_answer, watching
        from truedraft.cli.report import undrafted_line

        prompt: str | list[int]
        if self.chats:
            prompt = self._tokenizer.chat(messages, trust_control_tokens=self._talk.trust_control_tokens)
        else:
            prompt = "".join(each["content"] for each in messages)
        write = writer(self._tokenizer, self._terminal, self._talk.show_drafts)
        with watching(self._engine, self._terminal) as decisions:
            answer = stream_answer(self._engine, prompt, self._params, write)
        turn.text = answer.text or ""
        turn.tokens = len(answer.token_ids)
        turn.tokens_per_call = answer.stats.mean_acceptance_length
        turn.undrafted = undrafted_line(self._engine, answer.stats)
        speedup = decisions.speedup()
        turn.speedup = None if speedup is None else speedup.factor


def _requested_model(options: ChatOptions) -> str | None:
    """The requested model of a server; None if none was named."""
    given = changed_fields(options.stack) + ["show_drafts"] * options.talk.show_drafts
    if wrong := next((name for name in given if name != "model"), None):
        raise OptionError("is for a model here, and --url talks to one that a server has; leave it out", field=wrong)
    return options.stack.model if "model" in given else None


class _Server:
    """Answers with a model on a server, by default its first; has the attributes of `_Local`.

    Raises OptionError if the address, the key or the model cannot be used, PeerError if no server with a model answers.
    """

    def __init__(self, url: str, model: str | None, params: SamplingParams, notify: Callable[[str], None]) -> None:
        self._params = params
        try:
            with errors_about("url"):
                self._caller = Caller(
                    url,
                    api_key=os.environ.get(_KEY) or None,
                    timeout_s=_SILENCE_S,
                    tell=notify,
                    follows=True,
                    key_from=f"the environment variable {_KEY}",
                )
        except OptionError as error:
            error.call_fields({"api_key": _KEY})
            raise
        listed = _objects(self._caller.get("/v1/models").get("data"))
        served = {each["id"]: each for each in listed if isinstance(each.get("id"), str)}
        if not served:
            raise PeerError(f"{self._caller.url} lists no model at /v1/models; load one there, or correct the address")
        if model is not None and model not in served:
            models = visible(", ".join(map(repr, served)))
            raise OptionError(f"{model!r} is none of the models that {self._caller.url} has: {models}", field="model")
        self.name = next(iter(served)) if model is None else model
        self.chats = bool(served[self.name].get("chat", True))

    def answer(self, messages: list[dict[str, str]], turn: _Turn, show: Callable[[str], None]) -> None:
        """As `_Local.answer`; `show` is called with each piece of text."""
        params = self._params
        body: dict[str, Any] = {"model": self.name, "stream": True, "stream_options": {"include_usage": True}}
        body |= record_of(params, "max_tokens", "temperature", "top_p", "top_k", "min_p")
        given = {name: each for name, each in record_of(params, "stop_token_ids", "ignore_eos").items() if each}
        body |= given | ({} if params.seed is None else {"seed": params.seed})
        if self.chats:
            path, body["messages"] = "/v1/chat/completions", messages
        else:
            path, body["prompt"] = "/v1/completions", "".join(each["content"] for each in messages)
        finished = False
        try:
            with contextlib.closing(self._caller.events(path, body)) as chunks:
                for chunk in chunks:
                    finished = _read_chunk(chunk, turn, show) or finished
        except PeerError:
            if not finished:  # after the last token an error loses no text
                raise
        if not finished and not turn.text:
            raise PeerError(f"{self._caller.url}{path} answered nothing; is this the address of an API?")


def _read_chunk(chunk: Mapping[str, Any], turn: _Turn, show: Callable[[Any], None]) -> bool:
    """Add an event to an answer; returns whether the answer is finished."""
    finished = False
    for choice in _objects(chunk.get("choices")):
        text = choice.get("text") or _object(choice.get("delta")).get("content")
        if isinstance(text, str):
            text = text.encode(errors="replace").decode()  # replaces lone surrogates
            turn.text += text
            show(visible(text))
        finished = finished or choice.get("finish_reason") is not None
    speculation = _object(chunk.get("speculation"))
    if speculation:
        turn.tokens_per_call = _number(speculation.get("mean_acceptance_length"))
        turn.speedup = _number(_object(speculation.get("speedup")).get("factor"))
    if (tokens := _number(_object(chunk.get("usage")).get("completion_tokens"))) is not None:
        turn.tokens = int(tokens)
    return finished


def _objects(found: object) -> list[Mapping[str, Any]]:
    """The objects of a list; empty if `found` is not a list."""
    return [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []


def _object(found: object) -> Mapping[str, Any]:
    return found if isinstance(found, Mapping) else {}


def _number(found: object) -> float | None:
    return float(found) if isinstance(found, int | float) and abs(found) <= sys.float_info.max else None
