"""Paths that users type: those of docs, README, examples and deploy's files before packages moved still import."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import truedraft
from truedraft.moved import MOVED, new_name

SOURCE = Path(truedraft.__file__).parent
PATHS = {
    "truedraft": "Engine SamplingParams load_model pictures",
    "truedraft.certify": "Stack certify",
    "truedraft.certify.engines": "",
    "truedraft.certify.processes": "FAULTS WrongAxis certify_process planted",
    "truedraft.certify.samplers": "Sampler certify_sampler",
    "truedraft.cluster.proxy": "middlewares",
    "truedraft.control": "FixedBudget",
    "truedraft.core.probs": "overlap residual total_variation",
    "truedraft.core.proposal": "DrawKind",
    "truedraft.core.tree": "TokenTree",
    "truedraft.costs": "",
    "truedraft.deploy.ray": "Predictor app",
    "truedraft.drafters": "Budget Drafter DrawKind NgramDrafter PromptLookup Proposal Purpose TokenTree draw",
    "truedraft.drafters.ngram": "",
    "truedraft.engine": "BeamSearch",
    "truedraft.learning": "",
    "truedraft.machine": "",
    "truedraft.models": "",
    "truedraft.models.huggingface": "HuggingFaceModel",
    "truedraft.peers": "ProcessPeer",
    "truedraft.peers.samplers": "eagle sglang_formula vllm",
    "truedraft.planning": "",
    "truedraft.planning.decisions": "",
    "truedraft.process": "Chains Cheaper Draft Gaussian GaussianSteps LastOutput Process Windows speculate",
    "truedraft.server": "serve warm_up",
    "truedraft.testing": "MarkovModel",
    "truedraft.theory": "CostCurve TargetCost expected_tokens predicted_speedup",
    "truedraft.training": "NgramConfig train_ngrams",
    "truedraft.verification": "",
    "truedraft.verification.rule": "DrawnToken JudgedRow",
}
EXTRAS = {"truedraft.deploy.ray": "ray", "truedraft.cluster.proxy": "ray", "truedraft.server": "fastapi"}


@pytest.mark.parametrize("module", PATHS)
@pytest.mark.filterwarnings("ignore:.*its old name goes:DeprecationWarning")
def test_paths_of_the_docs_import(module: str) -> None:
    if module in EXTRAS:
        pytest.importorskip(EXTRAS[module])
    found = importlib.import_module(module)
    for name in PATHS[module].split():
        exec(f"from {module} import {name}", {})
    assert found is importlib.import_module(new_name(module) or module)


def test_an_old_name_warns_and_gives_the_module_itself() -> None:
    code = """
import warnings
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    import truedraft.control.goodput as old
import truedraft.engine.policy.goodput as new, sys
assert old is new and new.__spec__.name == "truedraft.engine.policy.goodput"
print([(each.category.__name__, str(each.message), each.filename) for each in seen])
try:
    import truedraft.control.nonsense
except ModuleNotFoundError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    told, refused = done.stdout.splitlines()
    assert "truedraft.control.goodput is truedraft.engine.policy.goodput now" in told
    assert "DeprecationWarning" in told and "<string>" in told and "No module named" in refused


def test_nothing_of_ours_uses_an_old_name() -> None:
    """Old names lead to what exists, and no package stands in their place."""
    for old, new in MOVED.items():
        assert importlib.util.find_spec(new) is not None
        assert not SOURCE.joinpath(*old.split(".")[1:]).exists()
    for path in SOURCE.rglob("*.py"):
        text = "" if path.name == "moved.py" else path.read_text()
        assert not [old for old in MOVED if f"from {old} import" in text or f"from {old}." in text], path
