"""The corpus of the recipe: what is taken, what pins it, what a difference does."""

from __future__ import annotations

import hashlib
import json
import platform

import pytest
from recipes.stdlib.sources import MANIFEST, PYTHON_VERSION, load_sources, read_library

from truedraft.errors import DataError

BODY = "\n".join(f"def function_{i}(argument):\n    return argument + {i}" for i in range(30))


@pytest.fixture
def library(tmp_path):
    root = tmp_path / "lib"
    files = {
        "os.py": "import sys\n" + BODY.replace("function", "system"),
        "copy_one.py": BODY,
        "test/copy_two.py": BODY + "\n# the same again\n",
        "encodings/cp437.py": "table = 1\n",
        "pydoc_data/topics.py": "topics = {}\n",
        "site-packages/other.py": "x = 1\n",
        "__pycache__/os.py": "x = 1\n",
        "empty.py": "\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "latin.py").write_bytes(b"# caf\xe9\n")
    return root


@pytest.fixture
def manifest(library, tmp_path):
    path = tmp_path / "manifest.json"
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in read_library(library).items()}
    path.write_text(json.dumps({"python": PYTHON_VERSION, "held_out": ["os.py"], "sha256": hashes}))
    return path


def test_generated_foreign_and_unreadable_files_stay_out(library):
    assert sorted(read_library(library)) == ["copy_one.py", "os.py", "test/copy_two.py"]


def test_an_unchanged_library_is_accepted(library, manifest):
    assert [source.path for source in load_sources(manifest, library)] == [
        "copy_one.py",
        "os.py",
        "test/copy_two.py",
    ]


def test_a_changed_a_missing_and_a_new_file_are_refused(library, manifest):
    (library / "os.py").write_text("import sys\n")
    with pytest.raises(DataError, match=r"1 files .* differ from the manifest \(first: os.py\)"):
        load_sources(manifest, library)
    (library / "os.py").unlink()
    (library / "new.py").write_text("x = 1\n")
    with pytest.raises(DataError, match=r"2 files .* \(first: new.py\)"):
        load_sources(manifest, library)


def test_another_python_is_refused(manifest, monkeypatch):
    monkeypatch.setattr(platform, "python_version", lambda: "3.12.0")
    with pytest.raises(DataError, match=r"pinned to .* Python 3.11.7, but this is Python 3.12.0"):
        load_sources(manifest)


def test_the_committed_manifest():
    pinned = json.loads(MANIFEST.read_text())
    held_out, hashes = set(pinned["held_out"]), pinned["sha256"]
    assert pinned["python"] == PYTHON_VERSION
    assert held_out < set(hashes)
    assert len(held_out) >= 32
    for cluster in pinned["near_duplicate_clusters"]:
        assert len(set(cluster) & held_out) in (0, len(cluster))
    assert not [name for name in hashes if name.startswith(("encodings/cp", "pydoc_data/topics", "site-packages"))]


def test_this_library_against_the_committed_manifest():
    if platform.python_version() != PYTHON_VERSION:
        pytest.skip(f"the recipe is pinned to Python {PYTHON_VERSION}")
    try:
        sources = load_sources()
    except DataError as error:
        pytest.skip(f"this standard library was modified by its distributor: {error}")
    held_out = {source.path for source in sources if source.held_out}
    train = {source.path for source in sources if not source.held_out}
    assert not held_out & train
    assert len(held_out) / len(sources) < 0.06
