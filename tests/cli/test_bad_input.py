"""Unusable arguments of every command: one line on standard error that says which and why, and exit status 2.

With --json an object says the same on standard output.
"""

from __future__ import annotations

import errno
import io
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cli.tiny import Run
from truedraft.cli import generate
from truedraft.cli.main import main

NOBODY = "http://127.0.0.1:9"
LONG = shlex.quote("too long " * 100)
TRAINED = "--model {target} --data text.txt --out new"
ANSWERS = "--tokens 300 --prompt-tokens 16 --answer-tokens 12 --steps 3"
GIVEN = {
    **dict.fromkeys(("generate", "plan", "doctor", "export", "certify stack", "train draft"), "--model {target}"),
    "bench": "--model {target} --max-tokens 4",
    "certify engine": "--model {target} --prompts good.txt",
    "certify compare": f"{NOBODY} {NOBODY} --model {{target}}",
    "train medusa": f"{TRAINED} {ANSWERS} --heads 2",
    "train redrafter": f"{TRAINED} {ANSWERS} --length 2",
    "train eagle": f"{TRAINED} {ANSWERS} --length 2 --layer 0",
    "train p-eagle": f"{TRAINED} {ANSWERS} --length 2 --layer 0",
    "train ngram": TRAINED,
}
"""Words before those of a case."""
REFUSED: dict[str, list[tuple[str, ...]]] = {
    "generate": [
        ("x --tempreture 1", "unknown option '--tempreture'; did you mean '--temperature'?"),
        ("x --max-tokens many", "--max-tokens"),
        ("x --max-tokens 0", "--max-tokens must be a whole number of 1 or more, got 0"),
        ("x --max-tokens 100000", "--max-tokens must be at most", "max_tokens"),
        ("x --drafter nomod:X", "unknown drafter 'nomod', and no module of that name can be imported"),
        ("x --temperature -1", "--temperature must be"),
        ("x --temperature nan", "--temperature must be"),
        ("x --top-p 0", "--top-p must be"),
        ("x --top-k -1", "--top-k", "top_k"),
        ("x --min-p 2", "--min-p"),
        ("x --seed -1", "--seed"),
        ("x --seed", "'--seed' requires an argument"),
        ("x --stop ''", "stop holds an empty text"),
        ("x --threads 0", "--threads must be 1 or more, got 0"),
        ("x --dtype bfloat", "unknown dtype 'bfloat'; did you mean 'bfloat16'?"),
        ("x --device gpu", "unknown device 'gpu'"),
        ("x --weights q5", "unknown weights 'q5'; did you mean 'q8'? valid: q4, q8"),
        ("x --weights q8 --no-fast-paths", "does not run by the native forward, which alone has products"),
        ("x --kv-dtype int4", "unknown kv dtype 'int4'; did you mean 'int8'? valid: auto, int8"),
        ("x --device cuda:99", "is not on this machine"),
        ("x --rule speculativ", "unknown rule 'speculativ'; did you mean 'speculative'?"),
        ("x --rule speculative,lenience=0", "lenience must be above 0 and at most 1, got 0", "rule"),
        ("x --drafter prompt-lokup", "unknown drafter 'prompt-lokup'; did you mean 'prompt-lookup'?", "drafter"),
        ("x --drafter prompt-lookup,max_ngrams=3", "did you mean 'max_ngram'?"),
        ("x --drafter draft:./nowhere", "there is no folder './nowhere'"),
        ("x --drafter medusa:nothere", "there is no folder 'nothere' of a medusa drafter"),
        ("x --chat", "has no chat template"),
        ("x y", "unexpected extra argument"),
        ("''", "the prompt is empty", "prompt"),
        ("'\udcff'", "the prompt is not UTF-8 text"),
        ("{long}", "the prompt has 900 tokens"),
        ("x --prompts good.txt", "either a PROMPT or --prompts FILE, not both"),
        ("--prompts absent.txt", "there is no prompts file 'absent.txt'"),
        ("--prompts folder", "must be .jsonl"),
        ("--prompts prompts.csv", "must be .jsonl"),
        ("--prompts empty.txt", "holds no prompt"),
        ("--prompts latin.txt", "is not UTF-8 text (byte 3)"),
        ("--prompts bad.jsonl", "bad.jsonl, line 2: not JSON"),
        ("--prompts list.jsonl", "list.jsonl, line 1: a list, not an object"),
        ("--prompts other.jsonl", 'other.jsonl, line 1: the object needs "prompt" or "text"'),
        ("--prompts void.jsonl", "void.jsonl, line 1: the prompt is empty"),
        ("x --model ./nowhere", "there is no folder './nowhere'", "model"),
        ("x --model folder", "is a folder without config.json"),
        ("x --model good.txt", "is a file"),
        ("x --model '~nobody-of-that-name/m'", "'~nobody-of-that-name/m' names the home folder of nobody"),
        ("x --model embedded:targt", "did you mean 'target'?"),
        ("x --drafters-dir absent", "--drafters-dir must be a folder of drafters, and 'absent' is no folder"),
        ("x --drafter 'portfolio(prompt-lookup;auto)'", "has 'auto' as a member; name single drafters"),
        ("x --drafter 'portfolio(prompt-lookup'", "has a parenthesis without its second"),
    ],
    "generate, beams": [
        ("x --num-beams 0", "--num-beams must be 1 or more, got 0"),
        ("x --length-penalty 2", "--length-penalty is of beam search; give --num-beams of 2 or more, too"),
        ("x --num-beams 4 --draft-beams 3", "--draft-beams must be a whole number of 4 or more, got 3"),
        ("x --num-beams 4 --num-return-sequences 5", "must be at most --num-beams, 4, got 5"),
        ("x --num-beams 4 --early-stopping soon", "--early-stopping must be true, false or never, got 'soon'"),
        ("x --num-beams 4 --length-penalty nan", "--length-penalty must lie between -5.0 and 5.0, got nan"),
        ("x --num-beams 4 --length-penalty 1e308", "must lie between -5.0 and 5.0, got 1e+308"),
        ("x --num-beams 2 --image no.png", "--image does not go with --num-beams"),
        ("x --num-beams 4 --drafter prompt-lookup", "must be draft:MODEL, none or auto for a beam search"),
        ("x --num-beams 4 --drafter draft:x,branching=2-2", "branching is for drafted trees"),
        ("x --num-beams 4 --drafter draft:./nowhere", "there is no folder './nowhere'"),
        *(
            (f"x --num-beams 4 {words}", f"{words.split()[0]} does not go with --num-beams")
            for words in ("--temperature 1", "--seed 3", "--adapter sql", "--adapters sql=tuned", "--rule block")
        ),
        ("x --num-beams 4 --controller fixed", "--controller does not go with --num-beams"),
        ("x --num-beams 4 --show-drafts", "--show-drafts does not go with --num-beams"),
        ("x --num-beams 4 --explain", "--explain does not go with --num-beams"),
    ],
    "generate, adapters and controllers": [
        ("x --adapters sql", "--adapters must be of the form NAME=DIR, got 'sql'"),
        ("x --adapters sql=nowhere", "'nowhere' holds no adapter"),
        ("x --adapter sql", "--adapter names 'sql', and the target was loaded without adapters"),
        ("x --merge-adapter nowhere", "'nowhere' holds no adapter"),
        ("x --controller foo", "unknown controller 'foo'; valid: confidence, fixed, goodput, heuristic, in-turn"),
        ("x --controller goodput,probing=2", "probing must be a share of time in [0, 0.5], got 2"),
        ("x --controller schedule", "a schedule needs a length"),
        ("x --rule typical --seed 3 --temperature 1", "--seed promises the same answer whatever drafts, and rule"),
    ],
    "bench": [
        ("--batch 0", "--batch must be 1 or more, got 0", "batch"),
        ("--prompts humaneval", "there is no prompt set 'humaneval'; give heldout", "prompts"),
        ("--prompts nowhere.jsonl", "there is no prompts file"),
        ("--prompts .", "holds no questions of HumanEval"),
        ("--peer vllm", "unknown peer 'vllm'; valid: transformers"),
        ("--drafter draf --out new/deep", "unknown drafter 'draf'; did you mean 'draft'"),
        ("--runs 0", "--runs must be 1 or more, got 0"),
        ("--limit 0", "--limit must be 1 or more, got 0"),
        ("--top-p 2", "--top-p must be"),
        ("--pad-to 50M", "50M"),
        ("--pad-to 110", "did you mean"),
        ("--out good.txt", "cannot write into 'good.txt'"),
        ("--threads 0", "--threads must be 1 or more"),
        ("--controller foo", "unknown controller 'foo'"),
        ("--rule typical --seed 3 --temperature 1", "--seed promises the same answer whatever drafts, and rule"),
    ],
    "plan": [
        ("--alpha 0.8 --prompts four.txt", "--cost is needed with --alpha", "cost"),
        ("--cost 0.1 --prompts four.txt", "--alpha is needed with --cost", "alpha"),
        ("--alpha 1.8 --cost 0.1 --prompts four.txt", "[0, 1]", "alpha"),
        ("--alpha 0.8 --cost -1 --prompts four.txt", "0 or more", "cost"),
        ("--length 3 --prompts four.txt", "--alpha", "length"),
        ("--bandwidth 2 --prompts four.txt", "--simulate", "bandwidth"),
        ("--simulate nothing.json --prompts four.txt", "cannot read", "simulate"),
        ("--simulate four.txt --alpha 0.5 --cost 0.1 --prompts four.txt", "two ways", "alpha"),
        ("--prompts three.txt", "must be 4 or more", "prompts"),
        ("--limit 3", "there are 3", "prompts"),
        ("--drafter nobody --prompts four.txt", "unknown drafter", "drafter"),
        ("--drafter none --prompts four.txt", "no drafter to plan with", "drafter"),
        ("--prompts four.txt --max-tokens 1", "second token"),
        ("--token-ms 5", "is for --load", "token_ms"),
        ("--load 0", "must be", "load"),
        ("--alpha 0.5 --cost 0.1 --load 5", "curves", "load"),
        ("--drafter draft:{draft},min_probability=0.5 --temperature 1 --prompts four.txt", "stops by min_probability"),
    ],
    "doctor": [
        ("", "--drafter is needed", "drafter"),
        ("--drafter ./nowhere", "there is no folder", "drafter"),
        ("--drafter self:int4", "'self:int4' says no folder; heads and draft models are examined", "drafter"),
        ("--url http://127.0.0.1:1 --drafter ./nowhere", "there is no folder", "drafter"),
        ("--drafter eagle:full", "does not hold an EAGLE-3 head", "drafter"),
        ("--drafter nowhere --fix full", "'full' holds something; name a new folder", "fix"),
        ("--drafter {draft} --prompts three.txt", "needs 12 prompts or more"),
        ("--drafter {draft} --tokens 1", "--tokens must be 2 or more, got 1"),
        ("--url http://127.0.0.1:9", "nothing answers at", "url"),
        ("--url http://127.0.0.1:9 --drafter full", "has no card that promises something: 'full'", "drafter"),
    ],
    "export": [
        ("--out new --pad-to 111M", "unknown padding size '111M'; did you mean '110M'? valid: 110M, 500M"),
        ("--out new --pad-to 110M --model ./nowhere", "there is no folder"),
        ("--out new --dtype float8", "unknown dtype 'float8'"),
        ("--out full --pad-to 110M", "is not empty; name a new one"),
        ("--out full/file", "is a file; name a new folder"),
        ("--out full/file/below", "cannot write to the folder"),
        ("--pad-to 110M", "missing option '--out'"),
        ("--out new --threads 0", "--threads must be 1 or more, got 0"),
        ("embedded --out new", "--for is needed with DRAFTER: one of vllm, sglang, llamacpp, speculators"),
        ("embedded --out new --for vllm --pad-to 110M", "a drafter cannot be padded", "pad_to"),
        ("--out new --for vllm", "DRAFTER is needed with --for"),
        ("nowhere --out new --for vlm", "unknown engine 'vlm'; did you mean 'vllm'?"),
        ("eagle:nowhere --out new --for vllm", "there is no folder 'nowhere' with an EAGLE-3"),
    ],
    "info": [
        ("--jsn", "unknown option '--jsn'; did you mean '--json'?"),
        ("--drafters-dir nowhere", "--drafters-dir must be a folder of drafters, and "),
        ("--model ./nowhere", "there is no folder"),
        ("./nowhere", "there is no folder"),
        ("one --model two", "--model is 'two', and the argument is 'one'", "model"),
    ],
    "certify stack": [
        ("--batch 0", "--batch must be 1 or more, got 0"),
        ("--minutes 0", "--minutes must be above 0, got 0", "minutes"),
        ("--minutes -1", "--minutes must be above 0, got -1"),
        ("--minutes nan", "--minutes must be above 0, got nan"),
        ("--temperature -1", "--temperature must be"),
        ("--rule blok", "did you mean 'block'"),
        ("--rule typical --seeded", "--seeded promises the same answer"),
        ("--drafter medusaa", "did you mean 'medusa'"),
        ("--prompts nowhere.txt", "no prompts file"),
        ("--model /nowhere/at/all", "/nowhere/at/all"),
        ("--out /dev/null/report", "cannot write '/dev/null/report'"),
    ],
    "certify engine": [
        ("http://127.0.0.1:9", "127.0.0.1:9"),
        ("nonsense", "'nonsense' is no address; give one such as http://127.0.0.1:8000"),
        ("ftp://127.0.0.1:8000", "'ftp://127.0.0.1:8000' is no address"),
        ("http://", "'http://' is no address"),
        ("http://127.0.0.1:9 --process a:b", "two things to certify"),
        ("", "URL names what is certified, or --process MODULE:FUNCTION does; give one"),
        ("http://127.0.0.1:9 http://127.0.0.1:9", "unexpected extra argument"),
        ("http://127.0.0.1:9 --drafter none", "unknown option '--drafter'"),
        ("--process os:getcwd --max-tokens 9", "unknown option '--max-tokens'"),
        ("--process os:getcwd --timeout 9", "--timeout is for a server"),
        ("http://127.0.0.1:9 --seed 3", "--seed needs --seed-per-request; give that, too"),
        ("--process os:getcwd", "(the temperature is 1 by default; 0 requests greedy answers)"),
        ("--process os:getcwd --temperature 0 --seed-per-request", "--process 'os:getcwd' has no argument seed; name"),
        ("--process os:nothing", "nothing"),
        ("http://127.0.0.1:9 --api-key-env NO_SUCH_KEY", "NO_SUCH_KEY"),
        ("http://127.0.0.1:9 --timeout 0", "--timeout"),
        ("--process os:getcwd --junit /tmp", "--junit is a folder, '/tmp'; name a file"),
        ("--process os:getcwd --transcript '~nobody-at-all/x'", "the home folder of nobody"),
        ("--process os:getcwd --junit nowhere/x.xml", "nowhere"),
    ],
    "certify compare": [
        ("--draft-model m", "unknown option '--draft-model'"),
        ("--allowance 1", "unknown option '--allowance'"),
        ("--no-float32", "unknown option '--no-float32'"),
        ("--dtype x", "unknown option '--dtype'"),
    ],
    "certify sampler": [
        ("nowhere_at_all:f", "SAMPLER names no module that there is, 'nowhere_at_all'"),
        ("nothing", "SAMPLER must be module:function, got 'nothing'"),
        ("truedraft.measure.peers.samplers:medussa", "did you mean 'medusa'?"),
        ("json:dumps", "asks for 'obj'"),
        ("truedraft.measure.peers.samplers:sglang", "pip install sgl-kernel"),
        ("truedraft.measure.peers.samplers:eagle --drafter draft", "unknown option '--drafter'"),
        ("truedraft.measure.peers.samplers:eagle --batch 4", "unknown option '--batch'"),
        ("", "missing argument"),
        ("truedraft.measure.peers.samplers:eagle --minutes 0", "--minutes must be above 0"),
    ],
    "train draft": [
        ("", "missing option '--out'"),
        ("--out new", "nothing to train on"),
        ("--out new --data good.txt --steps 0", "--steps must be 1 or more, got 0"),
        ("--out new --data good.txt --length 100", "a multiple of --length"),
        ("--out new --data good.txt --learning-rate 0", "--learning-rate must be"),
        ("--out new --data good.txt --seed -1", "--seed must be 0 or more, got -1"),
        ("--out new --data good.txt --heads 3", "a multiple of twice the heads"),
        ("--out good.txt --data good.txt", "is a file"),
        ("--out new --data good.txt --resume", "holds no training"),
        ("--out new --data good.txt --model folder", "without config.json"),
    ],
    "train medusa": [
        ("--heads 0", "--heads must be a whole number of 1 or more, got 0"),
        ("--stage 3", "--stage must be 1 (heads alone) or 2"),
        ("--learning-rate 0", "--learning-rate must be a number above 0"),
        ("--backbone-rate nan", "--backbone-rate must be a number above 0"),
        ("--epochs -1", "--epochs must be a number above 0"),
        ("--law-share 1.5", "--law-share must be a number in [0, 1]"),
        ("--temperature -1", "--temperature must be a number, 0 or more"),
        ("--answer-tokens 0", "--answer-tokens must be 1 or more"),
        ("--joint-steps 0", "--joint-steps must be"),
        ("--lora-rank -1", "--lora-rank must be"),
        ("--seed -1", "--seed must be"),
        ("--minutes 0", "--minutes must be a number above 0, got 0.0"),
        ("--minutes 1 --stage 2", "minutes are a limit for stage 1"),
        ("--tokens 20000", "tokens by the target, and 20,000 are asked for: give more text, or ask for fewer"),
        ("--clean", "holds no working files of a training; there is nothing to remove"),
        ("--resume", "holds no training to go on with; leave --resume out"),
        ("--data nowhere.txt", "there is no data file 'nowhere.txt'"),
    ],
    "train redrafter": [
        ("--length 0", "--length must be a whole number of 1 or more, got 0"),
        ("--state 0", "--state must be a whole number of 1 or more"),
        ("--layers -1", "--layers must be a whole number of 0 or more"),
        ("--loss klx", "unknown loss 'klx'; did you mean 'kl'?"),
        ("--laws store", "unknown kind of distributions 'store'; did you mean 'stored'?"),
        ("--laws stored --loss ce", "--laws need not be stored for the loss 'ce'"),
        ("--self-fed 2", "--self-fed must be a number in [0, 1]"),
        ("--place-decay 0", "--place-decay must lie in (0, 1]"),
        ("--exit-width 32", "got an exit width of 32"),
        ("--summed --state 32", "a state that sums embeddings has their 64 entries, got 32"),
        ("--stage 2", "--stage"),
    ],
    "train eagle": [
        ("--length 0", "--length must be a whole number of 1 or more, got 0"),
        ("--draft-vocab -1", "--draft-vocab must be a whole number of 0 or more"),
        ("--loss ce", "--loss must compare distributions"),
        ("--layer 0", "an EAGLE-3 head reads different layers, 0 the first, got [0, 0]"),
        ("--kv-heads 3", "must be a multiple of those"),
    ],
    "train p-eagle": [
        ("--depth 0", "--depth must be a whole number of 1 or more, got 0"),
        ("--kept 1.5", "--kept must lie in (0, 1], got 1.5"),
        ("--loss ce", "--loss must compare distributions"),
        ("--fc-norm", "unknown option '--fc-norm'"),
    ],
    "train ngram": [
        ("--order 0", "--order must be 1 or more, got 0"),
        ("--order 9", "--order must be 1 or more and at most 8, got 9"),
        ("--min-count 0", "--min-count must be"),
        ("--max-bytes much", "--max-bytes must be a size as 1000000, 300M or 1.5G, got 'much'"),
        ("--max-bytes 1K", "bytes, and 1,024 are allowed; allow more, or give less text"),
        ("--max-text-tokens 0", "--max-text-tokens must be"),
        ("--max-text-tokens 1 --order 3", "the longest text has 2 tokens"),
        ("--answers --tokens 0", "--tokens must be a whole number of 1 or more"),
        ("--resume", "holds no training to go on with; leave --resume out"),
    ],
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (folder := tmp_path / "files").mkdir()
    (folder / "empty.txt").write_text("\n\n")
    (folder / "latin.txt").write_bytes("café\n".encode("latin-1"))
    (folder / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    (folder / "list.jsonl").write_text("[1, 2]\n")
    (folder / "other.jsonl").write_text('{"question": "a"}\n')
    (folder / "void.jsonl").write_text('{"prompt": ""}\n')
    (folder / "good.txt").write_text("a\n")
    (folder / "three.txt").write_text("a\nb\nc\n")
    (folder / "four.txt").write_text("a\nb\nc\nd\n")
    (folder / "text.txt").write_text("".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(30)))
    (folder / "prompts.csv").write_text("a\n")
    (folder / "folder").mkdir()
    (folder / "tuned").mkdir()
    (folder / "tuned" / "adapter_config.json").write_text("{}")
    (folder / "full").mkdir()
    (folder / "full" / "file").write_text("mine")
    return folder


def crash(*_: object, **__: object) -> None:
    raise ZeroDivisionError("weights are loaded, which may take minutes")


@pytest.mark.parametrize("command", REFUSED)
@pytest.mark.usefixtures("quick_curves")
def test_a_command_refuses(
    run: Run, target: str, draft: str, files: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(files)
    if command in ("certify engine", "certify compare"):
        monkeypatch.setattr("truedraft.models.loading.load_model", crash)
    name, before = command.split(",")[0], sorted(files.rglob("*"))
    for words, phrase, *field in REFUSED[command]:
        typed = f"{name} --json {GIVEN.get(name, '')} {words}".format(target=target, draft=draft, long=LONG)
        result = run(*shlex.split(typed))
        case = f"{command} {words}: {result.err}"
        assert result.status == result.record["status"] == 2, case
        assert result.out.count("\n") == 1 and result.record["command"] == name, case
        assert phrase in result.record["error"] and result.record["field"] in (field or [result.record["field"]]), case
        assert_one_line(result.complaint, phrase)
        assert sorted(files.rglob("*")) == before, f"{case}: something is left behind"


def test_what_is_no_command(run: Run) -> None:
    for words, phrase in (
        (["generat"], "unknown command 'generat'; did you mean 'generate'? valid: "),
        (["cert"], "unknown command 'cert'; did you mean 'certify'? valid: "),
        (["train", "draf"], "unknown command 'draf'; did you mean 'draft'? valid: "),
        (["--jsn"], "unknown option '--jsn'"),
        (["train"], "missing command"),
        (["certify", "--minutes", "1"], "name one of its commands first: stack, engine, compare, sampler"),
    ):
        result = run(*words)
        assert (result.status, result.out) == (2, "")
        assert_one_line(result.err, phrase)
    assert run("nonsense", "--json").record["command"] == "nonsense"


def assert_one_line(err: str, phrase: str) -> None:
    assert phrase in err
    assert err.startswith("truedraft: error: ") and err.count("\n") == 1 and err.endswith("\n")


@pytest.mark.parametrize(("terminal", "phrase"), [(True, "give a PROMPT"), (False, "standard input is empty")])
def test_nobody_gives_a_prompt(run: Run, monkeypatch: pytest.MonkeyPatch, terminal: bool, phrase: str) -> None:
    stdin = io.StringIO("")
    monkeypatch.setattr(stdin, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stdin", stdin)
    result = run("generate")
    assert result.status == 2
    assert_one_line(result.err, phrase)


def test_standard_input_that_is_not_text(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8"))
    result = run("generate", "-")
    assert result.status == 2
    assert_one_line(result.err, "standard input is not utf-8 text (byte 3)")


def test_a_fault_of_ours_is_one_line_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(generate, "_run", broken)
    monkeypatch.delenv("TRUEDRAFT_DEBUG", raising=False)
    assert main(["generate", "x"]) == 1
    assert_one_line(capsys.readouterr().err, "internal error: RuntimeError: first line second line; please report it")
    monkeypatch.setenv("TRUEDRAFT_DEBUG", "1")
    assert main(["generate", "x"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_disk_that_is_full_is_no_fault_of_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "report.md")

    monkeypatch.setattr(generate, "_run", full)
    assert main(["generate", "x"]) == 1
    assert_one_line(capsys.readouterr().err, "error: cannot read or write report.md (No space left on device)")


def test_an_interruption_is_no_fault(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "_run", interrupted)
    assert main(["generate", "x"]) == 130
    assert capsys.readouterr().err == "truedraft: interrupted\n"


LIGHT = """
import sys
from truedraft.cli.main import main

for words in WORDS:
    status = main(words)
    heavy = [name for name in ("torch", "transformers") if name in sys.modules]
    assert (status, heavy) == (2, []), (words, status, heavy)
"""


def test_words_are_refused_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    """Nor can a model be loaded then."""
    none, out = str(tmp_path / "none"), ["--out", str(tmp_path / "out")]
    stack = [
        *(["--drafter", drafter] for drafter in ("foo", "draft,foo=1", "portfolio(draft;foo)", f"draft:{none}")),
        *([f"--{name}", none] for name in ("model", "drafters-dir", "plan", "merge-adapter", "weights", "rule")),
        *([f"--{name}", "foo"] for name in ("controller", "dtype", "device", "pad-to", "max-cache-bytes")),
        ["--model", "embedded:foo"], ["--model", f"{none}.gguf"], ["--model", "smolm2"],
    ]  # fmt: skip
    words = [["generate", "x", *each] for each in stack]
    words += [[command, *each] for command in ("serve", "chat") for each in stack[:2]]
    words += [[*command, "--rule", "foo"] for command in (["bench"], ["certify", "stack"])]
    words += [[command, "--prompts", f"{none}.txt"] for command in ("generate", "bench", "plan")]
    words += [[command, "--drafter", "foo"] for command in ("bench", "plan")]
    files = ("api-key-file", "chat-template", "tls-key", "tls-certificate")
    words += [["chat", "--adapters", named] for named in (f"a={none}", "a")] + [["plan", "--simulate", none]]
    words += [["serve", f"--{name}", none] for name in (*files, "allow-rule", "prefix-cache-bytes", "max-body-bytes")]
    words += [["serve", "--port", "99999"], ["info", "--model", none]]
    words += [["export", none, "--for", "vlm", *out], ["export", "--model", none, *out]]
    words += [["train", kind, "--model", "smollm2", *out] for kind in ("draft", "medusa", "eagle", "ngram")]
    words += [["train", kind, "--data", none, *out] for kind in ("draft", "redrafter", "ngram")]
    words += [["train", "medusa", "--start-from", none, "--data", str(Path(__file__)), *out]]
    run = subprocess.run(
        [sys.executable, "-c", LIGHT.replace("WORDS", repr(words))], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr[-2000:]
    lines = run.stderr.splitlines()
    assert len([line for line in lines if "error: " in line]) == len(words) and "internal" not in run.stderr
