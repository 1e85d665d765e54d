"""Files that are whole or not there: written under another name, then renamed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_file(path: Path):
    """Yields a temporary name that becomes `path` when it is written; gone where writing fails."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Never half a file."""
    with new_file(path) as temporary:
        temporary.write_text(text)


def append_text(path: Path, text: str) -> None:
    """The whole text, or on a full disk none of it."""
    size = path.stat().st_size if path.exists() else None
    try:
        with open(path, "a") as file:
            file.write(text)
    except OSError:
        if path.exists():
            os.truncate(path, size or 0)
        raise


def write_json(path: Path, content) -> None:
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def new_folder(path: Path, replace: bool = True):
    """Yields a temporary folder that becomes `path` when everything in it is written; replaces nothing but itself.

    replace=False: raises FileExistsError, before anything is written, where `path` is there.
    """
    path = Path(path)
    if path.exists() and not replace:
        raise FileExistsError(f"{path} exists; give another name, nothing is written over it")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if path.exists() and replace:  # an older version of the same: out of the way in one rename, then gone
            old = path.with_name(f".{path.name}.{os.getpid()}.old")
            path.rename(old)
            temporary.rename(path)
            shutil.rmtree(old)
        else:
            temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def file_hash(path: Path) -> str:
    """sha256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()
