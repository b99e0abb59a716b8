"""Other engines over the embedded models, each way of answering one that can be opened: for `certify_peers.py`.

Models are exported into runs/peers, once; logs of servers lie beside them.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from common import ROOT, asked_once, exported, note
from relabelled import save_relabelled
from servers import LLAMA_CPP, LLAMA_SERVER, VLLM, Drafting, Launch, answering, llamacpp_launch, vllm_launch
from truedraft.errors import PeerError
from truedraft.measure.peers import Peer
from truedraft.measure.peers.transformers import AssistedSetting, Generate, Way, assisted_way, lookup_way, universal_way
from truedraft.models.base import LanguageModel
from truedraft.text import Tokenizer

RUNS = ROOT / "runs" / "peers"
DRAFT_TOKENS = 3
NGRAM = 2
OTHER_MERGES = 2000
"""Of the draft's tokenizer left out, so that it is another than the target's."""
SETTING = AssistedSetting(f"{DRAFT_TOKENS} tokens", DRAFT_TOKENS, "constant", 0.0)
_IN_LLAMACPP = str(Path(__file__).with_name("peers_llamacpp.py"))


@dataclass(frozen=True)
class Running:
    """An engine that answers."""

    peer: Callable[[int, int], Peer]  # by how many questions are asked at once, and a seed for engines that take none
    check: Callable[[], None]  # raises PeerError where it died
    command: str = ""  # that started it, with paths relative to the repository; empty for one in this process
    url: str = ""  # of a server


@dataclass(frozen=True)
class EngineWay:
    engine: str
    way: str
    open: Callable[[LanguageModel], AbstractContextManager[Running]]
    batches: tuple[int, ...] = (1, 8)


def engine_ways() -> list[EngineWay]:
    ways: dict[str, Callable[[], Way]] = {
        "plain": Way,
        "prompt lookup": lookup_way,
        "assisted": lambda: assisted_way(stock("draft"), SETTING),
        "assisted, other tokenizer": universal,
    }
    servers = {"vllm": vllm, "llama.cpp": llamacpp}
    return [
        *(
            EngineWay(engine, way, partial(served, partial(launch, f"{engine} {way}", way)))
            for engine, launch in servers.items()
            for way in ("plain", "draft model", "n-grams")
        ),
        *(
            EngineWay("transformers", name, partial(in_process, way), (1, 8) if name == "plain" else (1,))
            for name, way in ways.items()
        ),
    ]


@contextlib.contextmanager
def served(
    launch: Callable[[], Launch], target: LanguageModel, logs: Path = RUNS, tokenizer: Tokenizer | None = None
) -> Iterator[Running]:
    """A server of a model; without a tokenizer it is the embedded target."""
    started, reader = launch(), tokenizer or Tokenizer.load(str(model_folder("target")))
    about = {"vocab_size": target.vocab_size, "eos_token_ids": target.eos_token_ids, "tell": note}
    with answering(started, logs, tokenizer=reader, **about) as (server, endpoint):
        words = " ".join(started.words).replace(f"{ROOT}/", "")
        yield Running(lambda together, seed: endpoint, server.check, words, server.url)


@contextlib.contextmanager
def in_process(way: Callable[[], Way], target: LanguageModel) -> Iterator[Running]:
    made, model = way(), stock("target")

    def peer(together: int, seed: int) -> Peer:
        return Generate(model, target.eos_token_ids, made, together=together, seed=seed)

    yield Running(peer, lambda: None)


def drafting(way: str, model: Callable[[str], Path]) -> Drafting | None:
    return None if way == "plain" else Drafting(DRAFT_TOKENS, model("draft") if way == "draft model" else None, NGRAM)


def vllm(name: str, way: str) -> Launch:
    """vLLM's server; the prompt cache is switched off, as a cached prompt is computed in other shapes."""
    more = ["--no-enable-prefix-caching"]
    return vllm_launch(name, VLLM, model_folder("target"), drafting(way, model_folder), more)


def llamacpp(name: str, way: str) -> Launch:
    return llamacpp_launch(name, LLAMA_SERVER, gguf("target"), drafting(way, gguf))


def universal() -> Way:
    """Assisted by the embedded draft under another tokenizer."""
    folder = RUNS / "draft-relabelled"
    if not (folder / "config.json").exists():
        save_relabelled(model_folder("draft"), folder, dropped=OTHER_MERGES, added=16)
    tokenizers = [AutoTokenizer.from_pretrained(each) for each in (model_folder("target"), folder)]
    return universal_way(loaded(folder), SETTING, *tokenizers)


@cache
def model_folder(name: str) -> Path:
    return exported(RUNS, name)


@cache
def stock(name: str) -> PreTrainedModel:
    """An embedded model as transformers runs it."""
    return loaded(model_folder(name))


def loaded(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


@cache
def gguf(name: str) -> Path:
    """An embedded model as a GGUF file, made by llama.cpp's own script.

    Raises:
        PeerError: that failed.
    """
    out = RUNS / f"{name}.gguf"
    if not out.exists():
        python, source = LLAMA_CPP / "bin" / "python", LLAMA_CPP / "src" / "vendor" / "llama.cpp"
        if not python.exists():
            raise PeerError(f"there is no {python}; `make certify-peers` makes it")
        command = [str(python), _IN_LLAMACPP, "convert", str(source), str(model_folder(name)), str(out)]
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
    words = [_IN_LLAMACPP, "surprise", str(file), str(threads)]
    places = {"PYTHONPATH": str(LLAMA_CPP / "src"), "LLAMA_CPP_LIB_PATH": str(LLAMA_SERVER.parent)}
    found: float = asked_once(words, {"pieces": pieces}, LLAMA_CPP / "bin" / "python", os.environ | places)
    return found
