"""Ways to draft with a recurrent head, against each other: `make results-redrafter`.

Acceptance of every way on all shipped prompts at the target's own size, and speed of the ways that are listed for it at
the cost of a larger model, each in turn with plain decoding. Beside them: what merging saves on real text, and how long
it takes. Variants of the head (other losses, for instance) are folders that were trained before. Writes one JSON
object. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from truedraft import Engine, SamplingParams, load_model
from truedraft.core.tree import chain_shape
from truedraft.drafters import Drafter, NoDrafter, Redrafter
from truedraft.drafters.heads.beams import Beams, beam_search, merge, trees_of, with_dropped
from truedraft.embedded import embedded_heads, heldout_prompts_file
from truedraft.heads.redrafter import RedrafterRunner
from truedraft.machine import this_machine
from truedraft.models.base import LanguageModel, Segment

_LISTED = (45, 4)
_TOKENS = 128
_CONTEXT = 16  # tokens of a prompt before the first beams


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to draft: which head, its sizes, and for which requests."""

    head: str
    beams: int
    length: int
    nodes: int
    temperature: float = 0.0
    sampled: bool = False
    coupled: bool = False
    timed: bool = False

    @property
    def params(self) -> SamplingParams:
        """Of the requests."""
        return SamplingParams(max_tokens=_TOKENS, temperature=self.temperature, seed=1 if self.coupled else None)


def ways(variants: list[str]) -> list[Way]:
    """What is compared; each of the first rows changes one thing of 8 beams of 4 cut to 16 nodes."""
    found = [Way("shipped", 8, 4, 16, t, timed=True) for t in (0.0, 1.0)]
    for t in (0.0, 1.0):
        found += [Way("shipped", beams, 4, 16, t, timed=beams in (4, 32)) for beams in (2, 4, 16, 32)]
        found += [Way("shipped", 8, length, 16, t, timed=length == 2) for length in (1, 2, 3, 5)]
        found += [Way("shipped", 8, 4, nodes, t, timed=nodes == 8) for nodes in (4, 8, 32)]
        found += [Way("shipped", 32, 5, 32, t)]
    found += [Way("shipped", 8, 4, 16, 1.0, coupled=True, timed=True)]
    for t, coupled in itertools.product((0.7, 1.0), (False, True)):
        found += [
            Way("shipped", 8, 4, 16, t, sampled=sampled, coupled=coupled) for sampled in (False, True)[: 2 - coupled]
        ]
    found += [Way("shipped", beams, 4, nodes, 1.0, sampled=True, timed=True) for beams, nodes in ((4, 8), (8, 16))]
    found += [Way(name, 8, 4, 16, t, timed=True) for name in variants for t in (0.0, 1.0)]
    chosen: dict[Way, bool] = {}
    for way in found:
        plain = dataclasses.replace(way, timed=False)
        chosen[plain] = chosen.get(plain, False) or way.timed
    return [dataclasses.replace(way, timed=timed) for way, timed in chosen.items()]


def main() -> None:
    """Measure everything and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head", type=Path, help="without it the embedded one")
    parser.add_argument("--variant", action="append", default=[], metavar="NAME=DIR", help="another head; repeatable")
    parser.add_argument("--size", default="500M", help="whose cost speed is measured at")
    parser.add_argument("--limit", type=int, default=32, help="prompts for acceptance; an eighth of them for speed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/redrafter_ways.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    heads = {"shipped": options.head or embedded_heads("redrafter")}
    heads |= {name: Path(folder) for name, _, folder in (each.partition("=") for each in options.variant)}
    prompts = [json.loads(line)["text"] for line in heldout_prompts_file().read_text().splitlines()][: options.limit]
    target = load_model("embedded:target")
    asked = ways(list(heads)[1:])
    rows = [dataclasses.asdict(way) | acceptance(target, drafter_of(way, heads), way, prompts) for way in asked]
    found: dict[str, Any] = {
        "what": f"recurrent heads on {len(prompts)} shipped prompts, {_TOKENS} tokens each",
        "machine": dataclasses.asdict(this_machine(torch.device("cpu"))),
        "torch": torch.__version__,
        "threads": options.threads,
        "merging": merging(target, Redrafter.load(heads["shipped"]), prompts),
    }
    del target
    large = load_model("embedded:target", pad_to=options.size)
    for row, way in zip(rows, asked, strict=True):
        if way.timed:
            row |= speed(large, drafter_of(way, heads), way, prompts[: max(1, len(prompts) // 8)])
    found |= {"cost_of": options.size, "ways": rows}
    options.out.write_text(json.dumps(found) + "\n")
    print(json.dumps(found))


def drafter_of(way: Way, heads: dict[str, Path]) -> Redrafter:
    """The drafter of a way."""
    return Redrafter.load(heads[way.head], beams=way.beams, length=way.length, nodes=way.nodes, sampled=way.sampled)


def acceptance(target: LanguageModel, drafter: Drafter, way: Way, prompts: list[str]) -> dict[str, Any]:
    """Tokens per target call, and what merging shared paths saved of the proposed trees."""
    answers = Engine(target, drafter, controller="fixed", entropy=1).generate(prompts, way.params)
    calls, emitted, nodes, listed = (
        sum(getattr(answer.stats, name) for answer in answers)
        for name in ("target_calls", "emitted_tokens", "draft_tokens", "listed_tokens")
    )
    return {
        "mean_acceptance_length": emitted / calls,
        "target_calls": calls,
        "nodes_per_call": nodes / calls,
        "listed_per_call": listed / calls,
    }


def speed(target: LanguageModel, drafter: Drafter, way: Way, prompts: list[str]) -> dict[str, Any]:
    """Against plain decoding in turns, prompt by prompt: the median of the ratios; and drafting beside a plain pass."""
    engines = {
        "plain": Engine(target, NoDrafter(), controller="fixed"),
        "drafted": Engine(target, drafter, controller="fixed"),
    }
    draft_s, pass_s = [], []
    engines["drafted"].listeners.append(lambda step: draft_s.append(step.draft_s) if step.nodes else None)
    engines["plain"].listeners.append(lambda step: None if step.prefill else pass_s.append(step.target_s))
    params = dataclasses.replace(way.params, max_tokens=64, ignore_eos=True)
    for engine in engines.values():
        engine.generate(prompts[0], dataclasses.replace(params, max_tokens=4))
    ratios = []
    for prompt in prompts:
        rates = {}
        for name, engine in engines.items():
            answer = engine.generate(prompt, params)
            rates[name] = (len(answer.token_ids) - 1) / answer.timing.decode_s
        ratios.append(rates["drafted"] / rates["plain"])
    proposal_s, plain_s = statistics.median(draft_s), statistics.median(pass_s)
    return {"speedup": statistics.median(ratios), "draft_s": proposal_s, "drafting_of_a_pass": proposal_s / plain_s}


@torch.inference_mode()
def merging(target: LanguageModel, drafter: Redrafter, prompts: list[str]) -> dict[str, Any]:
    """Nodes of merged beams against their plain list, and seconds of merging, on the code of the prompts themselves."""
    drafter.check(target)
    runner, (width, length) = RedrafterRunner(drafter.head, target), _LISTED
    nodes, seconds, seconds_with_dropped = [], [], []
    for prompt in prompts:
        assert target.tokenizer is not None
        ids = torch.tensor(target.tokenizer.encode(prompt))
        cache = target.new_cache()
        hidden = target.forward([Segment(cache, ids, chain_shape(len(ids)), range(len(ids)))]).hidden.clone()
        target.release_cache(cache)
        rows = slice(_CONTEXT, len(ids) - 1)
        steps = list(itertools.islice(beam_search(runner, hidden[rows], ids[_CONTEXT + 1 :], width), length))
        nodes += merge(steps[-1], width * length).counts.tolist()
        for beams, times in ((steps[-1], seconds), (with_dropped(steps), seconds_with_dropped)):
            for row in range(0, len(beams.tokens), 8):
                own = Beams(beams.tokens[row : row + 1], beams.scores[row : row + 1])
                began = time.perf_counter()
                trees_of(merge(own, 32))
                times.append(time.perf_counter() - began)
    listed = width * length
    return {
        "beams": width,
        "length": length,
        "listed": listed,
        "merged": statistics.fmean(nodes),
        "times_fewer": listed / statistics.fmean(nodes),
        "merge_s": statistics.median(seconds),
        "merge_with_dropped_s": statistics.median(seconds_with_dropped),
        "steps": len(nodes),
    }


if __name__ == "__main__":
    main()
