"""What loading a model and its first token cost, beside transformers: `python benchmarks/loading.py`.

    python benchmarks/loading.py [--model DIR] [--turns 5] [--out FILE]

Each turn starts both in processes of their own, one behind the other, so that a slow moment meets both. A process says
how long loading and the first token took behind its imports, and by how much its memory rose at most, against what the
weights take.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
OUT = HERE / "results" / "loading.json"
PROMPT = list(range(300, 332))


def peak_bytes() -> int:
    """The most memory that this process held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def by_transformers(folder: str) -> int:
    """Load it in bfloat16 and answer one token; bytes of its weights."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
    return sum(weight.nbytes for weight in model.parameters())


def by_truedraft(folder: str) -> int:
    """The same."""
    from truedraft import Engine, SamplingParams, load_model

    model = load_model(folder, dtype="bfloat16")
    Engine(model).generate(PROMPT, SamplingParams(max_tokens=1))
    return 0


SYSTEMS: dict[str, Callable[[str], int]] = {"transformers": by_transformers, "truedraft": by_truedraft}


def child(system: str, folder: str) -> None:
    """One system in this process."""
    import torch  # imports are not what is measured
    import transformers.models.auto

    import truedraft.models.loading  # noqa: F401

    before, began = peak_bytes(), time.perf_counter()
    weights = SYSTEMS[system](folder)
    seconds = time.perf_counter() - began
    told = {"seconds": seconds, "peak_bytes": peak_bytes() - before, "weight_bytes": weights}
    print(json.dumps(told | {"versions": [torch.__version__, transformers.__version__]}))


def main() -> int:
    """Measure, or be one of the processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(HERE.parent / "runs" / "serving" / "target-500M"))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--child", choices=list(SYSTEMS))
    asked = parser.parse_args()
    if asked.child:
        child(asked.child, asked.model)
        return 0
    turns = []
    for number in range(asked.turns + 1):
        turn = {}
        for system in SYSTEMS:
            command = [sys.executable, __file__, "--child", system, "--model", asked.model]
            ran = subprocess.run(command, capture_output=True, text=True, check=True)
            turn[system] = json.loads(ran.stdout.splitlines()[-1])
        if number:  # the first one reads the files from the disk
            turns.append(turn)
    weights = turns[0]["transformers"]["weight_bytes"]
    found = {
        "seconds, truedraft / transformers": statistics.median(
            turn["truedraft"]["seconds"] / turn["transformers"]["seconds"] for turn in turns
        ),
        "peak memory / weights": statistics.median(turn["truedraft"]["peak_bytes"] / weights for turn in turns),
        "peak memory / weights, transformers": statistics.median(
            turn["transformers"]["peak_bytes"] / weights for turn in turns
        ),
        "turns": turns,
    }
    asked.out.write_text(json.dumps(found) + "\n")
    print(json.dumps({name: value for name, value in found.items() if name != "turns"}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
