"""The folder of a training: one process at a time, and only its own files are removed."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from filelock import FileLock, Timeout

from truedraft.errors import OptionError
from truedraft.training.workspace import clear_work, exclusive_access, finish_work, free_bytes, log_of, refuse_busy

HOLDER = """
import sys, time
from pathlib import Path
from truedraft.training.workspace import exclusive_access
with exclusive_access(Path(sys.argv[1])):
    (Path(sys.argv[1]) / "log.jsonl").write_text("{}")
    print("holds", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that trains in `out`."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "out" / "work")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "holds\n"
        yield process
        process.kill()


def test_a_second_process_is_refused_by_name_and_the_lock_goes_with_the_first(holder, tmp_path):
    out = tmp_path / "out"
    message = rf"process {holder.pid} is training in '{out}': wait until it ends"
    for attempt in (1, 2):  # the first attempt leaves the name of the owner as it is
        with pytest.raises(OptionError, match=message), exclusive_access(out / "work"):
            raise AssertionError(f"attempt {attempt} was let in")
    with pytest.raises(OptionError, match=message):
        refuse_busy(out / "work")
    with pytest.raises(OptionError, match=message):
        clear_work(out)
    assert (out / "work" / "log.jsonl").is_file()
    holder.kill()
    holder.wait()
    refuse_busy(out / "work")
    with exclusive_access(out / "work"):
        pass
    assert clear_work(out) > 2 and not out.exists()


def test_a_lock_whose_file_is_removed_has_one_owner(tmp_path, monkeypatch):
    """Who waits for it and who lets it go let no second one in: what is asked of filelock's version."""
    path = tmp_path / "lock"
    first, lock = FileLock(path, thread_local=False), fcntl.flock
    first.acquire(timeout=0)

    def late(opened, how):
        """The file is removed between opening and locking, as `exclusive_access` does, and its lock is free."""
        if threading.current_thread() is not threading.main_thread() and first.is_locked and how & fcntl.LOCK_EX:
            path.unlink()
            first.release()
        return lock(opened, how)

    def take(timeout):
        taken = FileLock(path, thread_local=False)
        taken.acquire(timeout=timeout)
        return taken

    monkeypatch.setattr(fcntl, "flock", late)
    with ThreadPoolExecutor(1) as waiter, ThreadPoolExecutor(1) as next_one, ThreadPoolExecutor(1) as last:
        waited = waiter.submit(take, 5).result()
        with pytest.raises(Timeout):
            last.submit(take, 0).result()
        path.unlink()
        after = next_one.submit(take, 0).result()
        waited.release()
        with pytest.raises(Timeout):
            last.submit(take, 0).result()
        after.release()


def test_only_working_files_are_removed(tmp_path):
    out = tmp_path / "out"
    ours = ["work/checkpoint.pt", "work/train.hidden", "work/tree-ab12.jsonl", "stage-1/work/log.jsonl"]
    ours += ["work/joint/run.json"]
    others = ["heads.safetensors", "README.md", "work/thesis.doc", "stage-1/heads.safetensors"]
    for name in (*ours, *others):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("12345")
    assert clear_work(out) == 5 * len(ours)
    assert sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()) == sorted(others)


def test_a_finished_training_leaves_its_log_alone(tmp_path):
    for place in ("work", "work/joint"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "log.jsonl").write_text(place)
    (tmp_path / "heads.safetensors").touch()
    assert log_of(tmp_path) == tmp_path / "work/joint/log.jsonl"
    finish_work(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["heads.safetensors", "log.jsonl"]
    assert log_of(tmp_path).read_text() == "work/joint"
    finish_work(tmp_path)  # there is nothing to remove


def test_of_a_training_that_begins_nothing_or_is_given_up_nothing_stays(tmp_path):
    out = tmp_path / "out"
    assert free_bytes(out / "work") > 0
    with pytest.raises(ValueError, match="no"), exclusive_access(out / "work"):
        raise ValueError("no")
    assert not out.exists()
    with exclusive_access(out / "work"):
        (out / "work" / "train.jsonl").write_text("[]")
    clear_work(out)
    assert not out.exists()
    with pytest.raises(OptionError, match="nothing to remove"):
        clear_work(out)
