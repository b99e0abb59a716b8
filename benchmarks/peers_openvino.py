"""OpenVINO GenAI over a GGUF file, asked line by line by `peers_real.py`; runs in OpenVINO's environment.

    .venv-openvino/bin/python benchmarks/peers_openvino.py FILE DRAFT THREADS DRAFTED FOLDER

DRAFT is the draft model's GGUF file, or "-" for plain decoding alone. OpenVINO reads both files itself, once, and keeps
what it makes of them in FOLDER: draft models are taken in its own form only, and reading takes half a minute.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from common import be_asked

_MOST_BATCHED = 8192  # tokens; its own latency-oriented setting bounds nothing, but a scheduler's default is 256
_NGRAM = 3


def loaded(file: str, draft: str, threads: str, drafted: str, folder: str) -> Callable[[dict[str, Any]], Any]:
    on_cpu: dict[str, Any] = {"INFERENCE_NUM_THREADS": int(threads)}
    target = str(converted(Path(file), Path(folder)))

    def pipeline(**more: Any) -> Any:
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching, scheduler.max_num_batched_tokens = False, _MOST_BATCHED
        return genai.LLMPipeline(target, "CPU", scheduler_config=scheduler, **on_cpu, **more)

    ways: dict[str, tuple[Any, dict[str, int]]] = {"plain": (pipeline(), {})}
    if draft != "-":
        assistant = genai.draft_model(str(converted(Path(draft), Path(folder))), "CPU", **on_cpu)
        ways["draft"] = pipeline(draft_model=assistant), {"num_assistant_tokens": int(drafted)}
        ngrams = {"num_assistant_tokens": int(drafted), "max_ngram_size": _NGRAM}
        ways["lookup"] = pipeline(prompt_lookup=True), ngrams
    return lambda asked: answer(*ways[asked["way"]], asked)


def converted(file: Path, folder: Path) -> Path:
    """The folder of a model, which OpenVINO writes beside the file: so it reads it through a link."""
    folder /= file.stem
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / file.name
    if not link.exists():
        link.symlink_to(file.resolve())
    if not (folder / "openvino_model.xml").exists():
        genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
    return folder


def answer(pipeline: Any, drafting: dict[str, int], asked: dict[str, Any]) -> int:
    """Tokens of all answers; prompts are padded on the left."""
    prompts, widest = asked["prompts"], max(map(len, asked["prompts"]))
    ids, mask = (np.zeros((len(prompts), widest), dtype=np.int64) for _ in range(2))
    for row, prompt in enumerate(prompts):
        ids[row, widest - len(prompt) :], mask[row, widest - len(prompt) :] = prompt, 1
    config = genai.GenerationConfig(max_new_tokens=asked["max_tokens"], ignore_eos=asked["ignore_eos"], **drafting)
    if asked["temperature"]:
        config.do_sample, config.temperature, config.rng_seed = True, asked["temperature"], asked["seed"]
    else:
        config.do_sample = False
    config.eos_token_id, config.stop_token_ids = asked["eos"][0], set(asked["eos"])
    found = pipeline.generate(genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(mask)), config)
    return sum(len(tokens) - (tokens[-1] in asked["eos"]) for tokens in found.tokens)


if __name__ == "__main__":
    be_asked(lambda: loaded(*sys.argv[1:]))
