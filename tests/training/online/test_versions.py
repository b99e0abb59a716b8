"""Versions of heads on disk: whatever ends the process, a version that loads; and no other head's are served."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from support.two_domains import Unthreaded, ask, learnable_of, learning, prompts, teach, trained, two_domains, untrained
from truedraft.errors import OptionError
from truedraft.kinds.block.module import DSparkHead
from truedraft.kinds.medusa.module import MedusaHeads
from truedraft.kinds.redrafter.module import RedrafterHead
from truedraft.training.online.student import Student, Versions
from truedraft.training.online.traffic import Answered

_KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = {path}
import torch
torch.set_num_threads(1)
from support.two_domains import learnable_of, two_domains, untrained
import truedraft.training.online.student
from truedraft.training.online.student import Versions

truedraft.training.online.student._KEPT = 1
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")

def write_until_killed(folder, point):
    head, audited = untrained(), 0

    def killed(event, args):
        nonlocal audited
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if (writes or event in CHANGES) and str(folder) in str(args):
            audited += 1
            if audited == point:
                os.kill(os.getpid(), signal.SIGKILL)

    versions = Versions(folder, learnable_of(head), two_domains())
    sys.addaudithook(killed)
    for number in range(1, 5):
        with torch.no_grad():
            for weight in head.parameters():
                weight.fill_(number / 8)
        versions.name(versions.write(head))
        Path(f"{{folder}}.told").write_text(str(number))

folders, points = Path(sys.argv[1]), int(sys.argv[2])
for point in range(1, points):
    child = os.fork()
    if not child:
        write_until_killed(folders / str(point), point)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
    if not os.WIFSIGNALED(status):
        break
"""


def marks(folder: Path) -> int:
    """The number that the weights of the version which loads were marked with; 0 of the head itself."""
    found = Versions(folder, learnable_of(untrained()), two_domains()).load()
    if found is None:
        return 0
    number, head = found
    values = {float(each) for weight in head.parameters() for each in weight.flatten()[:1]}
    assert len(values) == 1 and 8 * min(values) == number, "a version is whole"
    return number


@pytest.mark.slow
def test_whatever_write_it_is_killed_at_the_last_named_version_loads(tmp_path: Path) -> None:
    """A process for each write, which kills itself there (SIGKILL); the last of them comes to its end."""
    path = [str(Path(__file__).parents[2]), *(each for each in sys.path if each.endswith("src"))]
    words = [sys.executable, "-c", _KILLED.format(path=path), str(tmp_path), "200"]
    subprocess.run(words, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    folders = sorted((each for each in tmp_path.iterdir() if each.is_dir()), key=lambda each: int(each.name))
    assert 30 < len(folders) < 199 and marks(folders[-1]) == 4
    for folder in folders:
        noted = tmp_path / f"{folder.name}.told"
        told = int(noted.read_text()) if noted.exists() else 0
        assert marks(folder) in (told, told + 1), folder
        versions = Versions(folder, learnable_of(untrained()), two_domains())  # and it goes on from there
        number = versions.write(trained())
        versions.name(number)
        found = versions.load()
        assert found is not None and found[0] == number
        assert len(list((folder / "versions").glob("*.tmp"))) <= 1


def test_what_is_written_are_heads_and_no_text(tmp_path: Path) -> None:
    learner = Unthreaded(tmp_path, share=1.0)
    engine = learning(untrained(), learner)
    teach(engine, learner, 0, 6)
    student = learner.student
    folder = tmp_path / "redrafter"
    assert json.loads((folder / "current.json").read_text())["version"] == student.served.version > 0
    kinds = {each.name for each in folder.rglob("*") if each.is_file()}
    assert kinds == {"current.json", "config.json", "heads.safetensors", "facts.json"}
    loaded = RedrafterHead.load(folder / "versions" / str(student.served.version))
    for name, weight in student.served.module.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name].double(), weight, rtol=1e-6, atol=1e-7)

    again = Unthreaded(tmp_path, share=1.0)  # as after a restart
    engine = learning(untrained(), again)
    ask(engine, prompts(0, 1))
    assert engine.drafter.trees is not None and again.student.served.version == student.served.version
    torch.testing.assert_close(
        dict(engine.drafter.trees.head.state_dict()), dict(student.served.module.state_dict()), rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("kind", [RedrafterHead, DSparkHead])
def test_a_rollback_is_named_on_disk_too(kind: type[Any], tmp_path: Path) -> None:
    learner, first, other = Unthreaded(tmp_path, share=1.0), untrained(kind, 1), untrained(kind)
    learning(first, learner)
    student = learner.student
    origin = student.served
    student._promote(type(origin)(other))
    folder = tmp_path / kind.kind
    assert json.loads((folder / "current.json").read_text())["version"] == 1
    found = Versions(folder, learnable_of(first), two_domains()).load()
    assert found is not None and found[0] == 1
    torch.testing.assert_close(dict(found[1].state_dict()), dict(other.state_dict()), rtol=1e-6, atol=1e-7)
    student._roll_back(origin)
    assert json.loads((folder / "current.json").read_text())["version"] == 0
    assert Versions(folder, learnable_of(first), two_domains()).load() is None


def test_each_tenant_has_versions_of_its_own(tmp_path: Path) -> None:
    learner = Unthreaded(tmp_path, per_tenant=True)
    learning(trained(), learner)
    for tenant in "ab":
        learner._take(tenant, Answered(torch.zeros(3, dtype=torch.int64), torch.zeros(3, 144)))
        student = learner._new_student(tenant, "redrafter")
        student._promote(type(student.served)(untrained()))
    assert len(list((tmp_path / "redrafter" / "tenants").iterdir())) == 2
    assert not (tmp_path / "redrafter" / "versions").exists()


@pytest.mark.parametrize("what", ["origin", "target", "kind", "damaged"])
def test_a_folder_of_something_else_is_refused_in_a_sentence(tmp_path: Path, what: str) -> None:
    versions = Versions(tmp_path / "redrafter", learnable_of(trained()), two_domains())
    versions.name(versions.write(trained()))
    head: Any = trained()
    if what == "origin":
        head = untrained()
    elif what == "kind":
        (tmp_path / "redrafter").rename(tmp_path / "medusa")
        head = untrained(MedusaHeads)
    elif what == "damaged":
        file = tmp_path / "redrafter" / "versions" / "1" / "heads.safetensors"
        file.write_bytes(file.read_bytes()[:99])
    else:
        pointer = tmp_path / "redrafter" / "current.json"
        pointer.write_text(json.dumps({**json.loads(pointer.read_text()), "target": "another"}))
    message = "cannot be served" if what == "damaged" else f"holds versions of another {what}"
    with pytest.raises(OptionError, match=message) as refused:
        learning(head, Unthreaded(tmp_path))
    assert refused.value.field == "learn_folder" and "\n" not in str(refused.value)
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="cannot be made"):
        learning(trained(), Unthreaded(tmp_path / "file" / "below"))


@pytest.mark.parametrize("fails", ["writing", "naming", "naming a rollback"])
def test_a_full_disk_keeps_no_worse_head_drafting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    """A version that is not written is not served; one that is not named is, and both are counted."""
    learner = Unthreaded(tmp_path, share=1.0)
    engine, student = learning(trained(), learner), learner.student
    drafter, other = engine.drafter.trees, type(student.served)(untrained())
    assert drafter is not None
    if fails == "naming a rollback":
        student._promote(other)
        ask(engine, prompts(0, 1))
        assert drafter.head is other.module

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def work(self: Student) -> bool:
        self._roll_back(self.origin) if fails == "naming a rollback" else self._promote(other)
        return True

    written = "take_place" if fails == "writing" else "written_whole"
    monkeypatch.setattr(f"truedraft.training.online.student.{written}", full)
    monkeypatch.setattr(Student, "work", work)
    learner._work()
    ask(engine, prompts(0, 1))
    assert student.served is (other if fails == "naming" else student.origin)
    assert drafter.head is (trained() if fails == "writing" else student.served.module)
    assert student.rollbacks == int(fails == "naming a rollback")
    assert learner.status.failures == 1 and "No space left" in caplog.text
