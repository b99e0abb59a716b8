"""Drafters that `truedraft export` wrote, served by another engine, against our own.

    python benchmarks/exported_drafters.py vllm [--model smollm2] [--drafters eagle:DIR dspark:DIR ...] [--minutes 3]
    python benchmarks/exported_drafters.py llamacpp ...

These are `make test-vllm`, by its CPU build, and `make test-llamacpp`. Without names the drafters are those that were
trained for the model. Each is served by the words that the export prints. A line of JSON says of each: what the engine
or the export refused, in its words; or whether greedy answers are the engine's plain ones up to near ties, the tokens
for each call there and here with the same chain, and a certificate at temperature 0 and 1. Exit status 1 where an
answer differs, acceptance lies over 5 % apart, or a certificate fails. vLLM's CPU build leaves the distribution
wherever it speculates above temperature 0, so that one function of it is put right (`vllm_put_right.py`) unless
--as-released is given; that certificate fails then.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import torch
from transformers import AutoModelForCausalLM

import peers_engines
from certify_peers import Bench, Cell, Effort, certificate
from common import RESULTS, ROOT, Lines, heldout_ids, ids_of, note
from peers_engines import Running
from servers import LLAMA_CPP, LLAMA_SERVER, VLLM, VLLM_SERVER, Launch, llamacpp_launch, vllm_launch
from truedraft import Engine, SamplingParams, load_model
from truedraft.core.stats import Counters
from truedraft.drafters.registry import find_drafters
from truedraft.drafters.specs import from_spec
from truedraft.errors import PeerError, TruedraftError
from truedraft.measure.bench import read_questions, spread
from truedraft.measure.peers.asking import Question
from truedraft.models.base import LanguageModel
from truedraft.options import Words

RUNS = ROOT / "runs"
CLOSE = 0.05
"""Tokens for each call, 1 + tokens of a chain * share accepted, may differ by this, of ours."""
TEMPERATURES = (0.0, 1.0)
PROMPT_TOKENS = 48
SET_PROMPTS = 12
"""Questions of each published set, evenly over it."""
_COUNTED = re.compile(r"^\w+:spec_decode_num_(draft|accepted)_tokens_total(?:\{.*\})? (\S+)$", re.MULTILINE)
_ERROR = re.compile(
    r"^(?:\(.*?\) )?(?:ERROR \S+ \S+ )?(?:\[\S+\] )?\s*(\w*(?:Error|Exception): .+|Value error, .+?)(?: \[type=.*)?$"
)
_FOLLOWS = "Engine core initialization failed"  # behind the error that is meant


def main() -> int:
    asked = _asked()
    torch.set_num_threads(asked.threads)
    folder, lines = RUNS / asked.engine / "target", Lines(asked.out or RESULTS / f"{asked.engine}_drafters.jsonl")
    place = _exported(["--model", asked.model], folder)
    if isinstance(place, str):
        raise SystemExit(place)
    target, rounded = (load_model(str(folder), dtype=dtype, fast_paths=False) for dtype in ("float32", "bfloat16"))
    bench = Bench(target, rounded, {}, asked_prompts(target, asked.prompts))
    names = asked.drafters or [f"{each.kind}:{each.folder}" for each in find_drafters(load_model(asked.model))]
    with served("plain", [], target, folder, asked) as running:
        plain, _ = greedy(running, bench.prompts[: asked.limit], asked.max_tokens)
    failed = False
    for word in names:
        line = checked(word, bench, folder, plain, asked)
        lines.add(line)
        failed |= line.get("passed") is False
    return int(failed)


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=_LAUNCHES)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--drafters", nargs="+", metavar="KIND:DIR", type=_with_folder, default=[])
    parser.add_argument(
        "--prompts", nargs="+", type=Path, default=[], metavar="DIR",
        help="folders of questions of published sets, in turn; without them the embedded models' held-out prompts",
    )  # fmt: skip
    parser.add_argument("--as-released", action="store_true", help="vLLM as it is")
    parser.add_argument("--limit", type=int, default=12, help="prompts whose greedy answers are compared")
    parser.add_argument("--max-tokens", type=int, default=128, help="of these")
    parser.add_argument("--minutes", type=float, default=3.0, help="for each certificate")
    parser.add_argument("--tokens", type=int, default=8000, help="of each certificate")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="without it the engine's among the results")
    return parser.parse_args()


def _with_folder(word: str) -> str:
    if Words.parse("drafter", word).path is None:
        raise argparse.ArgumentTypeError(f"{word!r} is not of the form KIND:DIR")
    return word


def asked_prompts(target: LanguageModel, folders: Sequence[Path]) -> list[list[int]]:
    if not folders:
        return heldout_ids(target, PROMPT_TOKENS)
    sets = [spread(read_questions(each)[1], SET_PROMPTS) for each in folders]
    return ids_of(target, [each.text for turn in zip(*sets, strict=False) for each in turn])


def checked(
    word: str, bench: Bench, folder: Path, plain: Sequence[Sequence[int]], asked: argparse.Namespace
) -> dict[str, Any]:
    words = Words.parse("drafter", word)
    kind = words.kind
    engine, name = asked.engine, Path(str(words.path)).name
    about = {"engine": engine, "drafter": kind, "folder": name, "model": Path(asked.model).name}
    made = _exported([word, "--for", engine, "--model", str(folder)], RUNS / engine / kind)
    if isinstance(made, str):
        note(f"{kind}: {made}")
        return about | {"refused": made, "by": "truedraft export"}
    prompts = bench.prompts[: len(plain)]
    about |= {"put_right": True} if engine == "vllm" and not asked.as_released else {}
    about |= {"prompts": [each.name for each in asked.prompts], "tokens": made["tokens"]}
    about["command"] = made["commands"][-1].replace(f"{ROOT}/", "")
    try:
        with served(kind, made["commands"], bench.target, folder, asked) as running:
            answers, accepted = greedy(running, prompts, asked.max_tokens)
            effort = Effort(asked.minutes, asked.tokens, 0)
            cells = [Cell(engine, kind, heat, 1.0, 1) for heat in TEMPERATURES]
            found = [certificate(cell, running, bench, effort) for cell in cells]
    except PeerError as error:
        told = refusal(RUNS / engine / f"{engine}-{kind}.log") or str(error)
        note(f"{kind}: {told}")
        return about | {"refused": told, "by": engine}
    own = ours(chain(word, kind, made["tokens"]), bench.rounded, prompts, asked.max_tokens)
    there, here = (1.0 + made["tokens"] * each for each in (accepted, own))
    kept = ("temperature", "verdict", "smallest_detectable_tv", "evidence", "allowance", "tokens", "error", "version")
    verdicts = [{name: line[name] for name in kept if name in line} for line in found]
    gaps = first_gaps(folder, prompts, plain, answers)
    line = about | {
        "answers": len(plain), "same_as_plain": len(plain) - len(gaps), "gaps_where_they_part": gaps,
        "tokens_per_call_there": there, "tokens_per_call_here": here, "certificates": verdicts,
    }  # fmt: skip
    line["passed"] = passes(line)
    note(f"{kind}: {json.dumps(line)}")
    return line


def passes(line: Mapping[str, Any]) -> bool:
    """Whether answers part at near ties alone, acceptance is as here, and no certificate speaks against it.

    Rounding that moves each log-probability by r at most, which the greedy certificate has measured, moves the gap of
    two tokens by 2 r at most.
    """
    allowed = 2.0 * line["certificates"][0].get("allowance", 0.0)
    ties = all(gap <= allowed for gap in line["gaps_where_they_part"])
    close = abs(line["tokens_per_call_there"] / line["tokens_per_call_here"] - 1.0) <= CLOSE
    fine = ("no deviation found", "not enough evidence")
    return ties and close and all(each["verdict"] in fine for each in line["certificates"])


def _exported(words: Sequence[str], out: Path) -> dict[str, Any] | str:
    """What `truedraft export` says, or the sentence of its refusal; folders are written anew, but for the target's."""
    kept = out / ".exported.json"
    if kept.exists() and words == ["--model", (before := json.loads(kept.read_text())).get("model")]:
        return dict(before)
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "truedraft", "export", *words, "--dtype", "bfloat16", "--out", str(out), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    record = json.loads(done.stdout.splitlines()[-1])
    if done.returncode:
        return str(record["error"])
    kept.write_text(json.dumps(record))
    return dict(record)


def served(
    name: str, commands: Sequence[str], target: LanguageModel, folder: Path, asked: argparse.Namespace
) -> AbstractContextManager[Running]:
    """The engine's server by the commands that an export printed; by none it answers plainly."""
    launch = partial(_LAUNCHES[asked.engine], f"{asked.engine} {name}", commands, folder, asked.as_released)
    return peers_engines.served(launch, target, RUNS / asked.engine, target.tokenizer)


def _vllm(name: str, commands: Sequence[str], folder: Path, as_released: bool) -> Launch:
    """The prompt cache is off, as in certificates, and nothing is compiled, which takes minutes."""
    program = VLLM_SERVER if as_released else [str(Path(__file__).with_name("vllm_put_right.py"))]
    more = shlex.split(commands[-1])[3:] if commands else []
    return vllm_launch(name, VLLM, folder, None, [*more, "--no-enable-prefix-caching", "--enforce-eager"], program)


def _llamacpp(name: str, commands: Sequence[str], folder: Path, as_released: bool) -> Launch:
    """The commands before the last one make GGUF files, by llama.cpp's script.

    Raises:
        PeerError: it makes none.
    """
    file = f"{folder}.gguf"
    *before, last = map(shlex.split, commands or _CONVERTED.format(folder=folder, file=file).splitlines())
    python, scripts = LLAMA_CPP / "bin" / "python", LLAMA_CPP / "src" / "vendor" / "llama.cpp"
    for _, script, *words in before:
        done = subprocess.run([python, scripts / script, *words], stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise PeerError(f"{shlex.join(words)}: {done.stderr.strip().splitlines()[-1]}")
    return llamacpp_launch(name, LLAMA_SERVER, Path(last[2]), None, [*last[3:], "--metrics"])


_CONVERTED = """python convert_hf_to_gguf.py {folder} --outfile {file}
llama-server -m {file}"""
_LAUNCHES = {"vllm": _vllm, "llamacpp": _llamacpp}


def greedy(running: Running, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[list[tuple[int, ...]], float]:
    """Greedy answers, one at a time, and the share of drafted tokens that were accepted, by the server's counts.

    Raises:
        PeerError: one was not answered.
    """
    params, answers, before = SamplingParams(tokens, temperature=0.0), [], _counts(running)
    for ids in prompts:
        for _, reply in running.peer(1, 0).answers([Question(tuple(ids), params)]):
            if isinstance(reply, PeerError):
                raise reply
            answers.append(reply.token_ids)
    drafted, accepted = (now - then for now, then in zip(_counts(running), before, strict=True))
    return answers, accepted / drafted if drafted else 0.0


def _counts(running: Running) -> tuple[float, float]:
    return counted(httpx2.get(f"{running.url}/metrics", timeout=30.0, trust_env=False).text)


def counted(metrics: str) -> tuple[float, float]:
    """Drafted and accepted tokens in the text of a server's metrics; 0 where it has none."""
    found = {name: float(value) for name, value in _COUNTED.findall(metrics)}
    return found.get("draft", 0.0), found.get("accepted", 0.0)


def refusal(log: Path) -> str:
    """The last error of a log that does not follow from another; "" where there is none."""
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    told = [match[1] for line in lines if (match := _ERROR.search(line)) and _FOLLOWS not in line]
    return told[-1] if told else ""


def chain(word: str, kind: str, tokens: int) -> str:
    """The drafter as a chain of so many tokens, as other engines draft."""
    words = Words.parse("drafter", word)
    option = f"branching={'-'.join('1' * tokens)}" if kind == "medusa" else f"num_speculative_tokens={tokens}"
    return f'{kind}:"{words.path}",{option}'


def ours(word: str, target: LanguageModel, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    engine, whole = Engine(target, from_spec(word, target), controller="fixed"), Counters()
    for answer in engine.generate([list(ids) for ids in prompts], SamplingParams(tokens, temperature=0.0)):
        whole += answer.stats
    return whole.accepted_tokens / whole.draft_tokens if whole.draft_tokens else 0.0


def first_gaps(
    folder: Path, prompts: Sequence[Sequence[int]], plain: Sequence[Sequence[int]], other: Sequence[Sequence[int]]
) -> list[float]:
    """Where two answers part: how far the log-probabilities of their next tokens lie apart, in float32.

    An answer that ended early is followed by the token that ends texts, which it does not show: infinitely far.
    """
    parted = [each for each in zip(prompts, plain, other, strict=True) if tuple(each[1]) != tuple(each[2])]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() if parted else None
    gaps = []
    for prompt, first, second in parted:
        same = next((n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
        if same is None:
            gaps.append(1e9)
            continue
        assert model is not None
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *first[:same]]])).logits[0, -1]
        gaps.append(abs(float(logits[first[same]] - logits[second[same]])))
    return gaps


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TruedraftError as error:
        sys.exit(str(error))
