"""The map of docs/structure.md, held: who may import whom, and what loads when."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "truedraft"
MODULES = sorted(SOURCE.rglob("*.py"))

# Rooms in their order: each imports those before it and what all stand on.
_BASE = ("errors", "options", "machine", "progress", "files", "lazy", "pictures", "compiled", "moved")
ROOMS = (
    *("core", "text", "verification", "models", "drafters", "engine", "testing", "measure", "training", "kinds"),
    *("process", "certify", "server", "cli", "deploy"),
)
BELOW: dict[str, set[str]] = {name: set(_BASE) for name in _BASE}
BELOW["machine"].add("__init__")  # for the version
for _place, _name in enumerate(ROOMS):
    BELOW[_name] = {*_BASE, *ROOMS[:_place]}
BELOW["cli"].add("__init__")
BELOW["__main__"] = {"cli"}
RE_EXPORTS = ("drafters/__init__.py", "training/__init__.py")
TORCH_FREE = ("core/params.py", "core/budget.py", "core/stats.py", "errors.py", "training/options.py")
TORCH_FREE_FOLDERS = ("core/theory",)
CONTROLLERS = ("acceptance", "base", "goodput", "heuristics", "plan", "specs")


def package_of(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports_of(path: Path, *, typing_too: bool = True) -> set[str]:
    """Names that a file imports, also inside functions; without those that only a type checker sees, if asked."""
    names: set[str] = set()
    tree = parsed(path)
    unseen: set[ast.AST] = set()
    if not typing_too:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                unseen.update(inner for statement in node.body for inner in ast.walk(statement))
    for node in ast.walk(tree):
        if node in unseen:
            continue
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names.add(node.module or "")
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return names


def test_modules_import_only_what_lies_below() -> None:
    for path in MODULES:
        package = package_of(path)
        if package == "__init__" or path.relative_to(SOURCE).as_posix() in RE_EXPORTS:
            continue  # these name public things of rooms above them, lazily
        assert package in BELOW, f"{package} is not on the map"
        for name in imports_of(path):
            parts = name.split(".")
            if parts[0] == "truedraft":
                used = parts[1] if len(parts) > 1 else "__init__"
                assert used == package or used in BELOW[package], f"{path.name} of {package} imports {name}"


KIND_NAMES = re.compile(r"eagle|medusa|redrafter|dflash|dspark|mtp", re.IGNORECASE)
KNOW_KINDS = {
    "drafters/kinds.py": "the table",
    "drafters/__init__.py": "public names",
    "training/__init__.py": "public names",
    "models/mtp.py": "reads the layers of a target's own files",
    "models/checkpoint.py": "names of their tensors",
    "models/loading.py": "leaves these layers out of a target",
    "drafters/specs.py": "auto takes the layer of a target's own files",
    "models/embedded.py": "names of folders of the embedded models",
    "drafters/exporting.py": "an option of SGLang's is called so",
    "measure/peers/samplers.py": "other projects' samplers, by their names",
}


def words_of(path: Path) -> set[str]:
    """Names, imports and strings of a file, without its docstrings."""
    found: set[str] = set()
    tree = parsed(path)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            found.add(node.value)
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(alias.name for alias in node.names)}
        else:
            found |= {value for value in (getattr(node, each, None) for each in ("id", "attr", "name", "arg")) if value}
    return {each for each in found if isinstance(each, str)}


def test_nobody_but_its_folder_and_the_table_knows_a_kind() -> None:
    knowing = {path.relative_to(SOURCE).as_posix() for path in MODULES if any(map(KIND_NAMES.search, words_of(path)))}
    assert {name for name in knowing if not name.startswith("kinds/")} == set(KNOW_KINDS)


def test_the_server_needs_neither_training_nor_measure() -> None:
    for path in (SOURCE / "server").rglob("*.py"):
        assert not [name for name in imports_of(path) if name.startswith(("truedraft.training", "truedraft.measure"))]


def test_transformers_stays_where_it_belongs() -> None:
    users = {"models", "text"}
    for path in MODULES:
        libraries = {name.split(".")[0] for name in imports_of(path, typing_too=False)}
        peer = path.relative_to(SOURCE).as_posix().startswith("measure/peers/")
        assert "transformers" not in libraries or package_of(path) in users or peer, path
        assert "tokenizers" not in libraries or package_of(path) == "text", path


def test_what_is_imported_is_installed_with_it() -> None:
    """By its dependencies or an extra; groups for development are nobody's who installs it."""
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    names = {re.split(r"[\[<>=]", each)[0] for each in declared}
    own = {"truedraft", *sys.stdlib_module_names}
    with_others = {"huggingface_hub", "jinja2", "pydantic", "pydantic_core", "starlette", "triton"}  # come with others
    judged = {"vllm", "sgl_kernel"}  # where they are installed
    found = {name.split(".")[0] for path in MODULES for name in imports_of(path)} - own - with_others - judged
    called = {"PIL": "pillow", "opentelemetry": "opentelemetry-sdk"}
    assert {called.get(name, name.replace("_", "-")) for name in found} <= names


def test_counters_budgets_parameters_and_control_need_no_torch() -> None:
    paths = [SOURCE / name for name in TORCH_FREE]
    paths += [path for folder in TORCH_FREE_FOLDERS for path in (SOURCE / folder).glob("*.py")]
    paths += [SOURCE / "engine" / "policy" / f"{name}.py" for name in CONTROLLERS]
    for path in paths:
        assert not {name.split(".")[0] for name in imports_of(path)} & {"torch", "numpy"}, path


def test_controllers_see_numbers_alone() -> None:
    for name in CONTROLLERS:
        used = {each for each in imports_of(SOURCE / "engine" / "policy" / f"{name}.py") if "truedraft" in each}
        allowed = ("truedraft.core", "truedraft.engine.policy", *(f"truedraft.{base}" for base in _BASE))
        assert all(each.startswith(allowed) for each in used), name


def test_the_engine_sees_ids_alone_but_where_prompts_and_options_are_read() -> None:
    knows = {path.name for path in (SOURCE / "engine").rglob("*.py") if "truedraft.text" in " ".join(imports_of(path))}
    assert knows == {"prompts.py"}


def loaded_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import truedraft",
        "from truedraft import SamplingParams; SamplingParams()",
        "from truedraft.core.stats import Counters; from truedraft.core.budget import Budget",
        "import truedraft.engine.policy",
        "import truedraft.text.tokenizer, truedraft.text.detokenizer",
        "import truedraft.cli.main",
    ],
)
def test_light_imports_stay_light(statement: str) -> None:
    assert not loaded_after(statement) & {"torch", "transformers", "tokenizers", "numpy", "scipy", "matplotlib"}


@pytest.mark.slow
def test_drafting_with_a_kind_imports_neither_training_nor_measure() -> None:
    kinds = [path.parent.name for path in (SOURCE / "kinds").glob("*/drafter.py")]
    statement = "; ".join(f"import truedraft.kinds.{kind}, truedraft.kinds.{kind}.drafter" for kind in sorted(kinds))
    assert len(kinds) >= 5
    assert not {
        name for name in loaded_after(statement) if name.startswith(("truedraft.training", "truedraft.measure"))
    }


def test_public_names_load_lazily_and_exist() -> None:
    import truedraft

    assert set(dir(truedraft)) >= set(truedraft.__all__)
    for name in truedraft.__all__:
        assert getattr(truedraft, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        truedraft.nonsense  # noqa: B018


def test_functions_fit_a_screen() -> None:
    for path in MODULES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None:
                assert node.end_lineno - node.lineno <= 60, f"{path.name}: {node.name}"
