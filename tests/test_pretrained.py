"""What comes with the library: whole, small, of known origin, and the default of every program that takes one."""

import json
import re
from pathlib import Path

import pytest
import yaml

from xpress import checkpoint, interop
from xpress.heads import Refiner

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
SHIPPED = sorted(path for path in (checkpoint.PACKAGE / "pretrained").iterdir() if path.is_dir())


def test_all_of_it_is_small():
    files = [file for folder in SHIPPED for file in folder.rglob("*")]
    assert SHIPPED and sum(file.stat().st_size for file in files) <= 40e6
    assert {file.suffix for file in files} == {".json", ".safetensors"}


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: folder.name)
def test_a_shipped_checkpoint_is_whole_and_says_where_it_comes_from(folder):
    weights = interop.read(f"pretrained/{folder.name}")
    assert weights.format == "ours" and weights.path == folder
    head = checkpoint.build_head(weights.head)
    assert isinstance(head, Refiner)
    head.load_state_dict({n.removeprefix("head."): t for n, t in weights.tensors.items() if n.startswith("head.")})
    found = checkpoint.provenance_of(folder)
    assert found["target"]["name"] == "smollm2-135m-instruct" and found["target"]["fingerprint"]
    assert found["data"]["response_tokens"] > 1e6 and found["data"]["sha256"] and found["recipe"]["steps"]
    assert found["init"]["sha256"] and found["versions"]["torch"] and found["metrics"]
    assert checkpoint.weights_hash(folder)[:16] in README and found["init"]["sha256"][:16] in README


def test_no_path_of_the_machine_that_trained_it():
    def texts(value):
        values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
        return [value] if isinstance(value, str) else [text for inner in values for text in texts(inner)]

    for folder in SHIPPED:
        for file in folder.glob("*.json"):
            assert not [text for text in texts(json.loads(file.read_text())) if re.match(r"[/~]|[A-Z]:\\", text)]


@pytest.mark.parametrize("name", ["eval_tau", "replay"])
def test_it_is_what_programs_take_by_themselves(name):
    chosen = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())["checkpoint"]
    assert checkpoint.locate(chosen) in SHIPPED
