"""How engines' servers are started: vLLM's CPU build and llama.cpp's server, plain, with a draft model, with n-grams.

Each engine lives in an environment of its own (`make certify-peers` builds them); nothing of it is imported here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common import ROOT
from servers import PORT, Launch

SERVED_NAME = "model"
"""What servers call the model they serve."""
VLLM, LLAMA_CPP = ROOT / ".venv-vllm", ROOT / ".venv-llamacpp"
VLLM_SERVER = ("-m", "vllm.entrypoints.openai.api_server")
"""By its module: the command asks for a package of the name vllm, and its CPU build has another."""
LLAMA_SERVER = LLAMA_CPP / "build" / "bin" / "llama-server"
PATIENCE_S = 1200.0
"""vLLM compiles before it answers, which takes minutes where others use the cores."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """How a server drafts.

    Attributes:
        tokens: drafted at a time, at most.
        model: folder of the draft model, or its GGUF file; None drafts n-grams of the text itself.
        ngram: tokens that must match before an n-gram draft: for vLLM at most so many and at least one.
    """

    tokens: int
    model: Path | None = None
    ngram: int = 3

    def check_model(self) -> dict[Path, str]:
        return {} if self.model is None else {self.model: _EXPORT}


_EXPORT = "truedraft export"
_MAKE = "make certify-peers"
_SEQUENCES = 32
_SLOTS = 8
_SLOT_TOKENS = 2048


def vllm_launch(
    name: str,
    venv: Path,
    target: Path,
    drafting: Drafting | None = None,
    more: Sequence[str] = (),
    program: Sequence[str] = VLLM_SERVER,
) -> Launch:
    started = (str(venv / "bin" / "python"), *program, "--model", str(target))
    named = ("--host", "127.0.0.1", "--port", PORT, "--served-model-name", SERVED_NAME, "--dtype", "bfloat16")
    limits = ("--max-num-seqs", str(_SEQUENCES))
    speculation = () if drafting is None else ("--speculative-config", json.dumps(_vllm_drafting(drafting)))
    needs = {venv / "bin" / "vllm": _MAKE, target: _EXPORT, **({} if drafting is None else drafting.check_model())}
    return Launch(name, (*started, *named, *limits, *speculation, *more), _vllm_environment(venv), needs=needs)


def _vllm_drafting(drafting: Drafting) -> Mapping[str, object]:
    if drafting.model is not None:
        return {"method": "draft_model", "model": str(drafting.model), "num_speculative_tokens": drafting.tokens}
    return {
        "method": "ngram", "num_speculative_tokens": drafting.tokens,
        "prompt_lookup_max": drafting.ngram, "prompt_lookup_min": 1,
    }  # fmt: skip


def _vllm_environment(venv: Path) -> dict[str, str]:
    """What vLLM's pages advise for CPUs: all cores (it would keep one for its front), its OpenMP, and tcmalloc.

    A model that was loaded in this process in bfloat16 has forbidden oneDNN tiles of AMX by the environment. vLLM would
    take that over, and its own attention uses tiles all the same: it is oneDNN that asks the system for them, and
    without that the first one is an illegal instruction. So oneDNN is told its default here.
    """
    wanted = (
        (venv / "lib", "libiomp5.so"),
        (Path("/usr/lib"), "libtcmalloc_minimal.so.4"),
        (Path("/usr/lib"), "libtcmalloc.so.4"),
    )
    found = [next(iter(sorted(folder.rglob(name))), None) for folder, name in wanted]
    return {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "ONEDNN_MAX_CPU_ISA": "DEFAULT",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, _cores())),
        "LD_PRELOAD": ":".join(str(path) for path in found if path is not None),
    }


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def llamacpp_launch(
    name: str, program: Path, target: Path, drafting: Drafting | None = None, more: Sequence[str] = ()
) -> Launch:
    served = (str(program), "--model", str(target), "--alias", SERVED_NAME, "--host", "127.0.0.1", "--port", PORT)
    # The context is shared among the slots. Its threads spin while they wait, which costs seconds on cores that others
    # use too, so it gets one; words behind these say otherwise.
    slots = ("--parallel", str(_SLOTS), "--ctx-size", str(_SLOTS * _SLOT_TOKENS), "--threads", "1")
    speculation = () if drafting is None else _llamacpp_drafting(drafting)
    needs = {program: _MAKE, target: _MAKE, **({} if drafting is None else drafting.check_model())}
    return Launch(name, (*served, *slots, *speculation, *more), needs=needs)


def _llamacpp_drafting(drafting: Drafting) -> tuple[str, ...]:
    tokens = str(drafting.tokens)
    if drafting.model is not None:
        return "--model-draft", str(drafting.model), "--spec-type", "draft-simple", "--spec-draft-n-max", tokens
    sizes = ("--spec-ngram-simple-size-n", str(drafting.ngram), "--spec-ngram-simple-size-m", tokens)
    return "--spec-type", "ngram-simple", "--spec-draft-n-max", tokens, *sizes
