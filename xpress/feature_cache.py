"""The target's features on disk: written once, read memory-mapped in every later epoch and run.

    <cache_dir>/<key>/cache.json                   what the key stands for
                      features-00000.safetensors   hidden [n,M·D], last [n,D], and log_norm [n] of a reduced vocabulary

The key covers everything that the numbers depend on, so a change of data, template, length or target makes a new cache.
Which row lies where follows from the rows alone, whatever their order and however they are split into those to train on
and those held out: shards need no index, any number of processes may write them, and a build that was interrupted goes
on with the shards that are missing.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from xpress.anchors import Batch
from xpress.batches import collate
from xpress.data import Row, data_facts
from xpress.features import OnlineFeatures
from xpress.files import new_file, write_json
from xpress.target import Features

FORMAT = 1  # raise it when what the files hold changes
SHARD_BYTES = 512 << 20


class CachedFeatures:
    """Batch -> (Features, log_norm) from disk: the numbers of `online`, to the bit where it sees batches of the same
    shape, else to rounding.

    rows: everything that will ever be asked for; facts: what else the numbers depend on (template, tokenizer, …); the
    target runs on `rows_at_once` rows of a shard.
    Call `build` before the first batch.
    """

    def __init__(
        self,
        cache_dir: str | Path,
        online: OnlineFeatures,
        rows: list[Row],
        max_length: int,
        facts: dict,
        shard_bytes: int = SHARD_BYTES,
        rows_at_once: int = 16,
    ):
        self.online, self.max_length, self.rows_at_once = online, max_length, rows_at_once
        rows = sorted(rows, key=lambda row: row.id)
        per_shard = max(1, shard_bytes // self.bytes_per_token)
        self.facts = {
            "format": FORMAT,
            "tokens_per_shard": per_shard,
            "target": online.target.fingerprint(),
            "target_dtype": str(online.target.dtype).removeprefix("torch."),
            "target_layer_ids": list(online.layer_ids),
            "log_norm": online.reduced,
            "dtype": str(online.dtype).removeprefix("torch."),
            "max_length": max_length,
            "rows": data_facts(rows)["sha256"],
            **facts,
        }
        key = hashlib.sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()[:16]
        self.folder = Path(cache_dir).expanduser() / key
        self.shards: list[list[Row]] = []
        self.places: dict[str, tuple[int, int, int]] = {}  # row id -> shard, first token, tokens
        filled = per_shard
        for row in rows:
            length = min(len(row.prompt_ids) + len(row.response_ids), max_length)
            if filled + length > per_shard:
                self.shards.append([])
                filled = 0
            if row.id in self.places:
                raise ValueError(f"data: two rows are called {row.id}; give every row an id of its own")
            self.places[row.id] = (len(self.shards) - 1, filled, length)
            self.shards[-1].append(row)
            filled += length
        self._open: dict = {}

    @property
    def bytes_per_token(self) -> int:
        width = (len(self.online.layer_ids) + 1) * self.online.target.hidden_size
        return width * self.online.dtype.itemsize + 4 * self.online.reduced

    @property
    def num_tokens(self) -> int:
        return sum(length for _, _, length in self.places.values())

    def _path(self, shard: int) -> Path:
        return self.folder / f"features-{shard:05d}.safetensors"

    def missing(self) -> list[int]:
        return [i for i in range(len(self.shards)) if not self._path(i).exists()]

    def build(self, rank: int = 0, world: int = 1, progress: Callable[[int, int], None] = lambda done, total: None):
        """Write this process's share of the missing shards, each whole or not at all.

        Raises OSError where the disk has no room for what is missing, before anything is computed; or when it fills up
        on the way: shards that are written stay, and the same command goes on.
        """
        missing = self.missing()
        need = self.bytes_per_token * sum(self.places[row.id][2] for i in missing for row in self.shards[i])
        self.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.folder).free
        if need > free:
            raise OSError(
                f"cache_dir={self.folder.parent}: features of {self.num_tokens} tokens still need {need / 1e9:.2f} GB, "
                f"the disk has {free / 1e9:.2f} GB; give another cache_dir, lower data.limit, or take features=online"
            )
        if rank == 0:
            write_json(self.folder / "cache.json", self.facts)
        # by number, not by place in the list: another process may have written some before this one looked
        mine = [i for i in missing if i % world == rank]
        total = sum(len(self.shards[i]) for i in mine)
        done = 0
        for i in mine:
            if self._path(i).exists():  # another run writes the same cache
                done += len(self.shards[i])
                progress(done, total)
                continue
            found: dict[str, tuple[Tensor, ...]] = {}
            rows = sorted(self.shards[i], key=lambda row: self.places[row.id][2])  # equal lengths: little padding
            for start in range(0, len(rows), self.rows_at_once):
                part = rows[start : start + self.rows_at_once]
                found.update(zip((row.id for row in part), self._of(part)))
                done += len(part)
                progress(done, total)
            columns = zip(*(found[row.id] for row in self.shards[i]))
            tensors = {name: torch.cat(column) for name, column in zip(("hidden", "last", "log_norm"), columns)}
            try:
                with new_file(self._path(i)) as temporary:
                    save_file(tensors, temporary)
            except (OSError, SafetensorError) as error:
                raise OSError(
                    f"cache_dir={self.folder.parent}: {self._path(i).name} could not be written ({error}); the shards "
                    "before it are whole. Make room or give another cache_dir; the same command goes on"
                ) from error

    def _of(self, rows: list[Row]) -> list[tuple[Tensor, ...]]:
        batch = collate(rows, self.max_length).to(self.online.target.device)
        features, log_norm = self.online(batch)
        found = [features.hidden, features.last] + ([] if log_norm is None else [log_norm])
        lengths = [self.places[row.id][2] for row in rows]
        return [tuple(x[i, :n].cpu() for x in found) for i, n in enumerate(lengths)]

    def __call__(self, batch: Batch) -> tuple[Features, Tensor | None]:
        sequences = []
        for names in batch.row_ids:
            documents = [self._read(*self.places[name]) for name in names]
            sequences.append([torch.cat(column) for column in zip(*documents)])
        padded = [torch.nn.utils.rnn.pad_sequence(list(c), batch_first=True) for c in zip(*sequences)]
        hidden, last, *rest = (x.to(batch.ids.device) for x in padded)
        return Features(hidden, last), rest[0] if rest else None

    def _read(self, shard: int, start: int, length: int) -> list[Tensor]:
        if shard not in self._open:
            path = self._path(shard)
            try:
                self._open[shard] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise OSError(
                    f"cache_dir={self.folder.parent}: {path} cannot be read ({error}); remove the file if it is there, "
                    "and the same command writes it again"
                ) from error
        file = self._open[shard]
        names = ("hidden", "last", "log_norm") if self.online.reduced else ("hidden", "last")
        return [file.get_slice(name)[start : start + length] for name in names]
