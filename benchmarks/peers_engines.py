"""Other engines over the embedded models, each way of answering one that can be opened: for `certify_peers.py`.

Models are exported into runs/peers, once; logs of servers lie beside them.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from common import asked_once, exported
from launches import SERVED_NAME, Drafting, llamacpp_launch, vllm_launch
from relabelled import save_relabelled
from servers import Launch, serving
from truedraft.errors import PeerError
from truedraft.models.base import LanguageModel
from truedraft.peers import Peer
from truedraft.peers.endpoint import Endpoint
from truedraft.peers.transformers import AssistedSetting, Generate, Way, assisted_way, lookup_way, universal_way
from truedraft.text import Tokenizer

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "runs" / "peers"
VLLM = ROOT / ".venv-vllm"
LLAMA_CPP = ROOT / ".venv-llamacpp"
PATIENCE_S = 1200.0
"""vLLM compiles before it answers, which takes minutes where others use the cores."""
DRAFT_TOKENS = 3
NGRAM = 2
OTHER_MERGES = 2000
"""Of the draft's tokenizer left out, so that it is another than the target's."""
SETTING = AssistedSetting(f"{DRAFT_TOKENS} tokens", DRAFT_TOKENS, "constant", 0.0)


@dataclass(frozen=True)
class Running:
    """An engine that answers.

    Attributes:
        peer: by the number of questions that are asked at once, and a seed for engines that take none.
        check: raises PeerError where it died.
        command: that started it, with paths relative to the repository; empty for one in this process.
    """

    peer: Callable[[int, int], Peer]
    check: Callable[[], None]
    command: str = ""


@dataclass(frozen=True)
class EngineWay:
    """A way of answering of an engine.

    Attributes:
        engine: its name.
        way: "plain", or how it drafts.
        open: starts it, with the target.
        batches: numbers of questions at once that it can be asked.
    """

    engine: str
    way: str
    open: Callable[[LanguageModel], AbstractContextManager[Running]]
    batches: tuple[int, ...] = (1, 8)


def engine_ways() -> list[EngineWay]:
    """All of them."""
    drafted, copied = "draft model", "n-grams"
    return [
        EngineWay("vllm", "plain", partial(served, partial(vllm, "plain", None))),
        EngineWay("vllm", drafted, partial(served, partial(vllm, "draft", lambda: model_folder("draft")))),
        EngineWay("vllm", copied, partial(served, partial(vllm, "ngram", lambda: None))),
        EngineWay("llama.cpp", "plain", partial(served, partial(llamacpp, "plain", None))),
        EngineWay("llama.cpp", drafted, partial(served, partial(llamacpp, "draft", lambda: gguf("draft")))),
        EngineWay("llama.cpp", copied, partial(served, partial(llamacpp, "ngram", lambda: None))),
        EngineWay("transformers", "plain", partial(in_process, Way)),
        EngineWay("transformers", "prompt lookup", partial(in_process, lookup_way), (1,)),
        EngineWay("transformers", "assisted", partial(in_process, assisted), (1,)),
        EngineWay("transformers", "assisted, other tokenizer", partial(in_process, universal), (1,)),
    ]


def note(words: str) -> None:
    """Say what is waited for."""
    sys.stderr.write(f"{words}\n")
    sys.stderr.flush()


@contextlib.contextmanager
def served(launch: Callable[[], Launch], target: LanguageModel) -> Iterator[Running]:
    """An engine's server."""
    started = launch()
    ends = target.eos_token_ids
    tokenizer = Tokenizer.load(str(model_folder("target")))
    with serving(started, RUNS, note, PATIENCE_S) as server, contextlib.ExitStack() as stack:
        endpoint = Endpoint.open(
            server.url, SERVED_NAME, tokenizer=tokenizer, vocab_size=target.vocab_size, eos_token_ids=ends, tell=note
        )
        stack.callback(endpoint.close)
        words = " ".join(started.words).replace(f"{ROOT}/", "")
        yield Running(lambda together, seed: endpoint, server.check, words)


@contextlib.contextmanager
def in_process(way: Callable[[], Way], target: LanguageModel) -> Iterator[Running]:
    """transformers, in this process."""
    made = way()
    model = stock("target")

    def peer(together: int, seed: int) -> Peer:
        return Generate(model, target.eos_token_ids, made, together=together, seed=seed)

    yield Running(peer, lambda: None)


def vllm(name: str, draft: Callable[[], Path | None] | None) -> Launch:
    """vLLM's server; the prompt cache is switched off, as a cached prompt is computed in other shapes."""
    drafting = None if draft is None else Drafting(DRAFT_TOKENS, draft(), NGRAM)
    return vllm_launch(f"vllm {name}", VLLM, model_folder("target"), drafting, ["--no-enable-prefix-caching"])


def llamacpp(name: str, draft: Callable[[], Path | None] | None) -> Launch:
    """llama.cpp's server."""
    drafting = None if draft is None else Drafting(DRAFT_TOKENS, draft(), NGRAM)
    return llamacpp_launch(f"llama.cpp {name}", LLAMA_CPP / "build" / "bin" / "llama-server", gguf("target"), drafting)


def assisted() -> Way:
    """Assisted by the embedded draft."""
    return assisted_way(stock("draft"), SETTING)


def universal() -> Way:
    """Assisted by the embedded draft under another tokenizer."""
    folder = RUNS / "draft-relabelled"
    if not (folder / "config.json").exists():
        save_relabelled(model_folder("draft"), folder, dropped=OTHER_MERGES, added=16)
    tokenizers = [AutoTokenizer.from_pretrained(each) for each in (model_folder("target"), folder)]
    return universal_way(loaded(folder), SETTING, *tokenizers)


@cache
def model_folder(name: str) -> Path:
    """An embedded model, exported."""
    return exported(RUNS, name)


@cache
def stock(name: str) -> PreTrainedModel:
    """An embedded model as transformers runs it."""
    return loaded(model_folder(name))


def loaded(folder: Path) -> PreTrainedModel:
    """A model in bfloat16, as the other engines hold it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


@cache
def gguf(name: str) -> Path:
    """An embedded model as a GGUF file, made by llama.cpp's own script.

    Raises:
        PeerError: that failed.
    """
    out = RUNS / f"{name}.gguf"
    if not out.exists():
        source = LLAMA_CPP / "src" / "vendor" / "llama.cpp"
        python = LLAMA_CPP / "bin" / "python"
        if not python.exists():
            raise PeerError(f"there is no {python}; `make certify-peers` makes it")
        script = Path(__file__).with_name("peers_gguf.py")
        command = [str(python), str(script), str(source), str(model_folder(name)), str(out)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            out.unlink(missing_ok=True)
            raise PeerError(f"llama.cpp's script made no {out}: {done.stderr.strip().splitlines()[-1:]}")
    return out


def llamacpp_surprise(file: Path, pieces: Sequence[Sequence[int]], threads: int) -> float:
    """The mean of minus the log probability that llama.cpp gives each token of a GGUF file's pieces of text.

    Raises:
        ChildEndedError: it died; its message is on standard error.
    """
    words = [str(Path(__file__).with_name("peers_llamacpp.py")), str(file), str(threads)]
    places = {"PYTHONPATH": str(LLAMA_CPP / "src"), "LLAMA_CPP_LIB_PATH": str(LLAMA_CPP / "build" / "bin")}
    found: float = asked_once(words, {"pieces": pieces}, LLAMA_CPP / "bin" / "python", os.environ | places)
    return found
