"""Servers as child processes: healthy, late, missing, dying, and ended with whatever they started."""

from __future__ import annotations

import os
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from servers import PORT, Drafting, Launch, Server, llamacpp_launch, serving, vllm_launch
from truedraft.errors import PeerError

HEALTHY = """
import http.server, subprocess, sys, time
port, late = int(sys.argv[1]), float(sys.argv[2])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("worker", child.pid, flush=True)
began = time.monotonic()
class Answer(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass
    def do_GET(self):
        fine = self.path == "/health" and time.monotonic() - began >= late
        self.send_response(200 if fine else 503); self.end_headers(); self.wfile.write(b"ok")
http.server.HTTPServer(("127.0.0.1", port), Answer).serve_forever()
"""


def healthy(late_s: float = 0.0) -> Launch:
    return Launch("fake engine", (sys.executable, "-c", HEALTHY, PORT, str(late_s)))


def test_a_server_is_waited_for_and_ended_with_its_workers(tmp_path: Path) -> None:
    with serving(healthy(late_s=0.5), tmp_path / "new") as server:
        server.check()
        with urllib.request.urlopen(f"{server.url}/health") as answer:
            assert answer.status == 200
        worker = int(server.log.read_text().split("worker ")[1].split()[0])
        os.kill(worker, 0)
        pid = server.pid
    for gone in (pid, worker):
        assert ended(gone), gone


def ended(pid: int) -> bool:
    """Whether a process is gone, or a corpse that nobody has looked at: a moment may pass."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    ("name", "program", "words"),
    [
        (
            "fake engine",
            "import sys; sys.exit('no such model')",
            r"fake engine ended with status 1 before it answered; .*fake-engine\.log ends with: no such model",
        ),
        ("a/b", "import os; os._exit(3)", r"a/b ended with status 3 before it answered; .*a-b\.log is empty"),
    ],
)
def test_one_that_dies_says_its_last_words(name: str, program: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=words), serving(Launch(name, (sys.executable, "-c", program)), tmp_path):
        pass


def test_one_that_dies_later_is_noticed(tmp_path: Path) -> None:
    server = Server(healthy(), tmp_path)
    server.wait()
    server._process.kill()
    server._process.wait()
    with pytest.raises(PeerError, match="fake engine ended with status -9; "):
        server.check()
    server.stop()


def test_patience_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("servers._NOTE_EVERY_S", 0.0)
    words = r"fake engine does not answer after 1 s; .*fake-engine\.log"
    with pytest.raises(PeerError, match=words), serving(healthy(late_s=600.0), tmp_path, patience_s=1.0):
        pass
    assert "fake engine is starting, 0 s: " in capsys.readouterr().err


def test_what_is_missing_is_named_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"cannot start: there is no .*/bin/vllm; `make certify-peers` makes it"):
        Server(vllm_launch("vllm", tmp_path, tmp_path), tmp_path)
    with pytest.raises(PeerError, match=r"there is no .*/draft\.gguf; "):
        drafting = Drafting(4, tmp_path / "draft.gguf")
        Server(llamacpp_launch("llama.cpp", Path(sys.executable), tmp_path, drafting), tmp_path)
    with pytest.raises(PeerError, match=r"fake cannot start: .*nothing is no program"):
        Server(Launch("fake", (str(tmp_path / "nothing"),)), tmp_path)


def test_commands_say_how_they_draft() -> None:
    target, draft = Path("target"), Path("draft")
    words = [
        (plain := vllm_launch("v", Path("venv"), target)).at(9),
        vllm_launch("v", Path("venv"), target, Drafting(3, draft)).at(9),
        vllm_launch("v", Path("venv"), target, Drafting(3, ngram=2)).at(9),
        llamacpp_launch("l", Path("llama-server"), target).at(9),
        llamacpp_launch("l", Path("llama-server"), target, Drafting(3, draft)).at(9),
        llamacpp_launch("l", Path("llama-server"), target, Drafting(3, ngram=2), ["--more"]).at(9),
    ]
    assert all(each[each.index("--port") + 1] == "9" for each in words)
    assert "--speculative-config" not in words[0] and "--spec-type" not in words[3]
    assert '"draft_model"' in words[1][-1] and '"ngram"' in words[2][-1] and '"prompt_lookup_max": 2' in words[2][-1]
    assert plain.environment["ONEDNN_MAX_CPU_ISA"] == "DEFAULT"  # whatever this process has set for itself
    assert vllm_launch("v", Path("venv"), target, program=["x.py"]).words[1:4] == ("x.py", "--model", "target")
    assert words[4][words[4].index("--spec-type") + 1] == "draft-simple" and "draft" in words[4]
    assert words[5][words[5].index("--spec-type") + 1] == "ngram-simple" and words[5][-1] == "--more"
