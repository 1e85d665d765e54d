"""The floors of the library: who may import whom, how long a file may be, and what `import xpress` does not load."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# From the ground up, and on one floor from left to right: a file imports from what stands before it.
FLOORS = [
    ["block", "sampling", "sequences", "linear", "stopping", "files", "memory"]
    + ["kernels.rows", "kernels.readout_tiles", "kernels.readout_argmax", "kernels.readout_sample"]
    + ["kernels.screen", "kernels.screening_tiles", "kernels.screening", "kernels.top_c"]
    + ["kernels.latent_tiles", "kernels.refiner_latent"]
    + ["kernels.dispatch", "kernels.step", "kernels.graphs", "kernels"],
    ["static", "lean", "target", "drafter_config", "attention", "static_draft", "drafter", "deer"]
    + ["heads.base", "heads.refiner", "heads.markov", "heads.domino", "heads.confidence", "heads"],
    ["draft", "fused", "refine", "verify", "lengths"],
    ["decode", "anchors", "lookups", "loss"],
    ["metrics", "watch", "probe", "recorded", "lossless", "prompts", "conversations", "data", "client", "generation"]
    + ["checkpoint", "interop", "gtest", "sampling_check", "evaluate"]
    + ["tables", "report", "results", "journal", "style", "curves", "panels", "figures", "markdown", "card", "hub"]
    + ["track", "batches", "features", "feature_cache", "trainee", "recipe", "state", "meter"]
    + ["launch", "footprint", "plan", "train"],
    ["parts", "arguments", "planning", "measuring", "replay", "replay_record", "replay_screen", "replay_page"]
    + ["build", "serve"]
    + [""],  # the package's own __init__
]
ORDER = {name: place for place, name in enumerate(name for floor in FLOORS for name in floor)}
FILES = sorted((ROOT / "xpress").rglob("*.py"))
SCRIPTS = sorted((ROOT / "scripts").glob("*.*"))
HYDRA = {"hydra", "omegaconf"}


def name_of(file: Path) -> str:
    """xpress/heads/base.py -> heads.base; a package is named by its folder."""
    parts = file.relative_to(ROOT / "xpress").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(file) for file in FILES}


def place(name: str) -> int:
    """Files of a folder that the table names as a whole stand where the folder does."""
    while name not in ORDER and "." in name:
        name = name.rpartition(".")[0]
    return ORDER[name]


def imports(source: str, package: str = "xpress") -> set[str]:
    """Dotted names that a file imports anywhere, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def own_imports(file: Path) -> set[str]:
    """The library's modules that a file imports, the most precise name of each."""
    package = ".".join(file.relative_to(ROOT).parts[:-1])
    found = set()
    for name in imports(file.read_text(), package):
        if name.split(".")[0] == "xpress":
            inner = name.partition(".")[2]
            while inner and inner not in MODULES:  # a class or function: its module
                inner = inner.rpartition(".")[0]
            found.add(inner)
    return found


def test_lazy_and_relative_imports_are_seen():
    source = (
        "import a.b\ndef f():\n    from xpress import train\n    from . import refine\n    from ..decode import cut"
    )
    assert imports(source, "xpress.heads") == {"a.b", "xpress.train", "xpress.heads.refine", "xpress.decode.cut"}
    found = own_imports(ROOT / "xpress" / "decode.py")
    assert found == {"draft", "drafter", "refine", "sampling", "sequences", "stopping", "verify"}


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_a_file_imports_only_from_below_or_from_its_left(file):
    """One order of all files: nothing above, nothing to the right, hence no cycle."""
    name = name_of(file)
    assert place(name) is not None  # every file has its floor: a new one goes into the table
    wrong = {other for other in own_imports(file) if place(other) >= place(name) and other != name}
    inside = {o for o in wrong if place(o) == place(name)}  # two files of one folder that the table names as a whole
    assert not wrong - inside, f"{name} imports {sorted(wrong)} from above or from its right"
    for other in inside:
        assert name not in own_imports(next(f for f in FILES if name_of(f) == other)), f"{name} and {other}: a cycle"


def test_nothing_but_scripts_and_build_knows_hydra():
    for file in FILES:
        knows = {name.split(".")[0] for name in imports(file.read_text())} & HYDRA
        assert not knows or name_of(file) == "build", f"{name_of(file)} imports {knows}"
    assert HYDRA <= {name.split(".")[0] for name in imports((ROOT / "xpress" / "build.py").read_text())}


@pytest.mark.parametrize("files, limit", [(FILES, 350), (SCRIPTS, 80)], ids=["xpress", "scripts"])
def test_files_are_short(files, limit):
    lengths = {file.name: len(file.read_text().splitlines()) for file in files if file.suffix in (".py", ".sh")}
    assert lengths and not {name: n for name, n in lengths.items() if n > limit}


def test_import_xpress_loads_no_heavy_library(capsys):
    code = """
import sys, time, torch
before, start = set(sys.modules), time.perf_counter()
import xpress
print(f"{time.perf_counter() - start:.2f}", *sorted(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent, check=True)
    seconds, *loaded = done.stdout.split()
    heavy = {"hydra", "omegaconf", "datasets", "wandb", "matplotlib", "accelerate", "triton"}
    assert not heavy & {name.split(".")[0] for name in loaded}
    modelling = {name for name in loaded if name.startswith("transformers.models.") and "modeling_" in name}
    assert modelling <= {"transformers.models.auto.modeling_auto"}  # a real one drags in triton and accelerate
    assert "xpress.decode" in loaded and "xpress.build" not in loaded
    with capsys.disabled():
        print(f"\nimport xpress: {seconds} s after torch")
