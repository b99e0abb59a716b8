"""What `truedraft doctor` says of a trained EAGLE-3 head and of a draft model, as they are and with planted faults.

Each fault is planted in a copy, and the doctor is asked as the command asks it. Adds a line of JSON for each: what was
planted, what was named, and tokens per call before and behind the fix.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from common import RESULTS, Lines
from truedraft import load_model
from truedraft.cli.doctor import written_prompts
from truedraft.cli.prompts import read_prompts
from truedraft.kinds.eagle.module import Eagle3Head
from truedraft.kinds.eagle.variants import inputs_exchanged
from truedraft.measure.bench import spread
from truedraft.measure.doctor import Prompt, examine
from truedraft.measure.variants import case_of, changed
from truedraft.models.base import LanguageModel

Planted = tuple[str, str, Callable[[Any, Path], None]]
"""A fault, the name that the doctor has for it, and what writes a drafter with it into a folder."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="the target")
    parser.add_argument("--eagle", type=Path, help="a head for it, of truedraft train eagle")
    parser.add_argument("--draft", type=Path, help="the folder of a draft model for it")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--only", nargs="*", help="of the faults")
    parser.add_argument("--out", type=Path, default=RESULTS / "doctor.jsonl")
    options = parser.parse_args()
    target = load_model(options.model)
    prompts = written_prompts(target, spread(read_prompts(None, options.prompts), options.limit), plain=False)
    for what, path, faults in (("eagle", options.eagle, HEAD), ("draft", options.draft, DRAFT)):
        for planted, name, write in faults if path is not None else ():
            if options.only and planted not in options.only:
                continue
            with tempfile.TemporaryDirectory() as folder:
                place = Path(folder) / "drafter"
                write(path, place)
                line = asked(target, prompts, place, options.tokens)
            about = {"model": Path(options.model).name, "drafter": what, "planted": planted, "expected": name}
            Lines(options.out).add(about | line)
            print(json.dumps(about | {"named": [each["name"] for each in line["faults"]]}), flush=True)


def asked(target: LanguageModel, prompts: list[Prompt], folder: Path, tokens: int) -> dict[str, Any]:
    kind, case = case_of(str(folder), target)
    found = examine(kind, case, prompts, tokens=tokens).as_dict()
    return found | {"variants": [each for each in found["variants"] if not each["reason"]]}


def head_with(change: Callable[[Any], Any]) -> Callable[[Path, Path], None]:
    def write(path: Path, folder: Path) -> None:
        head = Eagle3Head.load(path)
        change(head).save(folder, head.record, dtype=torch.float32)

    return write


def untrained(weight: str, flag: str) -> Callable[[Any], Any]:
    """A table of its own, with a row for each id, that nobody trained."""

    def change(head: Any) -> Any:
        noise = torch.randn(head.config.vocab_size, head.config.width, generator=torch.Generator().manual_seed(1))
        return changed(head, {flag: True}, weights={weight: (0.05 * noise).to(next(head.parameters()).dtype)})

    return change


def moved(by: int) -> Callable[[Any], Any]:
    return lambda head: changed(head, {"layers": tuple(each + by for each in head.config.layers)})


def reversed_layers(head: Any) -> Any:
    return changed(head, {"layers": head.config.layers[::-1]})


def far_apart(head: Any, by: float = 100.0) -> Any:
    """A vector in all rows of the LM head, which moves all logits alike: to float32 it is nothing."""
    weight = head.lm_head.weight.float()
    common = by * torch.randn(weight.shape[1], generator=torch.Generator().manual_seed(1))
    return changed(head.float(), {}, weights={"lm_head.weight": weight + common})


def as_offsets(head: Any) -> Any:
    return changed(head, {}, weights={"draft_ids": head.draft_ids - torch.arange(len(head.draft_ids))})


def flipped(name: str) -> Callable[[Any], Any]:
    return lambda head: changed(head, {name: not getattr(head.config, name)})


HEAD: tuple[Planted, ...] = (
    ("nothing", "", head_with(lambda head: head)),
    ("layers numbered one too high", "layers one earlier", head_with(moved(1))),
    ("layers numbered one too low", "layers one later", head_with(moved(-1))),
    ("layers the wrong way round", "layers reversed", head_with(reversed_layers)),
    ("norm_output flipped", "norm_output", head_with(flipped("norm_output"))),
    ("norm_before_residual flipped", "norm_before_residual", head_with(flipped("norm_before_residual"))),
    ("an embedding that nobody trained", "embedding of the target",
     head_with(untrained("embed_tokens.weight", "own_embedding"))),
    ("rope theta of 10", "rope theta 10000",
     head_with(lambda head: changed(head, {"rope": head.config.rope | {"rope_theta": 10.0}}))),
    ("inputs of the attention exchanged", "inputs exchanged", head_with(inputs_exchanged)),
    ("offsets where ids belong", "d2t as offsets", head_with(as_offsets)),
    ("logits that bfloat16 cannot tell apart", "float32", head_with(far_apart)),
)  # fmt: skip


def draft_with(change: Callable[[Path], None]) -> Callable[[Path, Path], None]:
    """Writes a copy of a draft model that a function changes."""

    def write(path: Path, folder: Path) -> None:
        shutil.copytree(path, folder)
        change(folder)

    return write


def theta_of(theta: float) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["rope_parameters"]["rope_theta"] = theta
        (folder / "config.json").write_text(json.dumps(config))

    return change


def ids_exchanged(folder: Path) -> None:
    """Rows of the embedding in another order, as of another tokenizer."""
    from safetensors.torch import load_file, save_file

    (file,), name = folder.glob("*.safetensors"), "model.embed_tokens.weight"
    weights = load_file(file)
    order = torch.randperm(len(weights[name]), generator=torch.Generator().manual_seed(1))
    save_file(weights | {name: weights[name][order].contiguous()}, file, {"format": "pt"})


def other_tokenizer(folder: Path) -> None:
    from truedraft.models.embedded import embedded_folder

    for file in embedded_folder("draft").glob("token*"):
        shutil.copy(file, folder / file.name)


DRAFT: tuple[Planted, ...] = (
    ("nothing", "", draft_with(lambda folder: None)),
    ("rope theta of 100", "rope theta of the target", draft_with(theta_of(100.0))),
    ("rows of another tokenizer", "other ids", draft_with(ids_exchanged)),
    ("files of another tokenizer", "ids of the target", draft_with(other_tokenizer)),
)


if __name__ == "__main__":
    main()
