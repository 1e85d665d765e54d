"""Features from disk are those of the target in the step; the key knows what they depend on; no file is ever half."""

import errno
import json
import multiprocessing
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from disk import TEMPLATE, byte_tokenizer, save_model
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file, save_file
from toys import make_rows, make_target, make_trainee

from xpress import build, feature_cache
from xpress.anchors import PADDING
from xpress.batches import collate
from xpress.data import Row
from xpress.feature_cache import CachedFeatures
from xpress.features import OnlineFeatures
from xpress.recipe import TrainSettings
from xpress.target import Features, Target
from xpress.train import Run

LAYERS = (0, 2)
ROWS = make_rows(9, 4, 12, 7, 5, 16, 3, 8)
TOKENS = sum(len(r.prompt_ids) + len(r.response_ids) for r in ROWS)


def make_cache(folder, target, rows=ROWS, reduced=False, dtype=torch.float32, max_length=99, tokens=24, **options):
    """A cache of shards of about `tokens` tokens, not yet built."""
    online = OnlineFeatures(target, LAYERS, reduced, dtype)
    size = (len(LAYERS) + 1) * target.hidden_size * dtype.itemsize + 4 * reduced
    options = {"facts": {}, "shard_bytes": tokens * size, **options}
    return CachedFeatures(folder, online, rows, max_length, **options)


def forbid(monkeypatch):
    """From now on the target runs for nobody."""

    def stop(*args):
        raise AssertionError("the target was asked")

    monkeypatch.setattr(Target, "features", stop)


def own_tokens(batch, found) -> list[torch.Tensor]:
    """hidden, last and log_norm of what is no padding."""
    features, log_norm = found
    keep = batch.documents != PADDING
    return [x[keep] for x in (features.hidden, features.last, log_norm) if x is not None]


# --- the numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("max_length", [99, 10])
def test_batches_of_the_same_shape_are_equal_to_the_bit(tmp_path, target, monkeypatch, reduced, dtype, max_length):
    """One row at a time in both: also of a row that max_length cuts."""
    cache = make_cache(tmp_path, target, reduced=reduced, dtype=dtype, max_length=max_length, rows_at_once=1)
    cache.build()
    assert len(cache.shards) > 2
    batches = [collate([row], max_length) for row in ROWS]
    wanted = [cache.online(batch) for batch in batches]
    forbid(monkeypatch)
    for batch, (features, log_norm) in zip(batches, wanted):
        found, found_norm = cache(batch)
        assert found.hidden.dtype == dtype and found.hidden.shape == (*batch.ids.shape, 64)
        assert torch.equal(found.hidden, features.hidden) and torch.equal(found.last, features.last)
        assert found_norm is log_norm is None or torch.equal(found_norm, log_norm)
        assert (log_norm is None) != reduced


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("sequences", [[0, 1, 2], [[5], [0, 1], [6, 7, 3]]], ids=["padded", "packed"])
def test_other_shapes_are_equal_to_rounding(tmp_path, target, reduced, sequences):
    """Padded batches, and packed ones, whose documents are read one after another from different shards."""
    cache = make_cache(tmp_path, target, reduced=reduced)
    cache.build()
    batch = collate([[ROWS[i] for i in ([s] if isinstance(s, int) else s)] for s in sequences], 99)
    online, cached = (own_tokens(batch, source(batch)) for source in (cache.online, cache))
    assert len(online) == len(cached) == 2 + reduced
    for ours, theirs in zip(cached, online):
        assert (ours - theirs).norm() < 1e-6 * theirs.norm()  # fp32 sums in another order
    if reduced:
        judged = batch.supervised.roll(-1, 1)
        exact = torch.logsumexp(target.lm_head(cache(batch)[0].last[judged]), -1)
        torch.testing.assert_close(cache(batch)[1][judged], exact, rtol=1e-6, atol=1e-6)


def run_of(source, trainee, **changes) -> Run:
    settings = TrainSettings(**{"steps": 4, "batch_size": 2, "max_anchors": 99, "lr": 1e-2, **changes})
    return Run(Path("nowhere"), trainee, ROWS, source, settings)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("draft_ids", [None, tuple(range(0, 97, 2))], ids=["whole", "reduced"])
def test_a_run_from_disk_has_the_same_losses(tmp_path, packing, draft_ids):
    target = make_target(dtype=torch.float64)
    cache = make_cache(tmp_path, target, reduced=draft_ids is not None, dtype=torch.float64)
    cache.build()
    told = []
    for source in (cache.online, cache):
        trainee = make_trainee(target, target_layer_ids=LAYERS, draft_ids=draft_ids, chunk=128)
        run = run_of(source, trainee, packing=packing, max_length=32)
        facts = [run.train_step() for _ in range(3)]
        told.append([value for step in facts for name, value in step.items() if "loss" in name or "norm" in name])
    assert len(told[0]) >= 12
    # log_norm is kept in fp32
    assert told[0] == pytest.approx(told[1], rel=1e-9 if draft_ids is None else 1e-5)


# --- the files --------------------------------------------------------------------------------------------------------


def test_every_token_lies_in_one_place(tmp_path, target):
    """Shards within their size, rows whole, the layout the same whatever the order of the rows."""
    cache = make_cache(tmp_path, target)
    told = []
    cache.build(progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (len(ROWS), len(ROWS)) and [d for d, _ in told] == sorted(d for d, _ in told)
    assert cache.num_tokens == TOKENS and cache.bytes_per_token == 4 * 96
    lengths = [load_file(cache._path(i))["hidden"].shape[0] for i in range(len(cache.shards))]
    assert sum(lengths) == TOKENS and max(lengths) <= 24 and len(lengths) >= TOKENS // 24
    for order in (ROWS[::-1], ROWS[3:] + ROWS[:3]):  # another split into training and held-out rows is another order
        other = make_cache(tmp_path, target, order)
        assert other.folder == cache.folder and other.places == cache.places and not other.missing()


def test_a_built_cache_asks_the_target_nothing(tmp_path, target, monkeypatch):
    make_cache(tmp_path, target).build()
    forbid(monkeypatch)
    again = make_cache(tmp_path, target)
    again.build()
    assert again(collate(ROWS[:2], 99))[0].hidden.shape == (2, 12, 64)
    with pytest.raises(AssertionError, match="the target was asked"):
        make_cache(tmp_path, target, max_length=98).build()


def test_an_interrupted_build_goes_on_with_what_is_missing(tmp_path, target, monkeypatch):
    """Ctrl-C in the third shard: two stay as they are, no temporary file, and the rest is written by the next build."""
    whole = make_cache(tmp_path / "straight", target, rows_at_once=1)
    whole.build()
    cache, online = make_cache(tmp_path / "cut", target, rows_at_once=1), OnlineFeatures.__call__
    before = sum(len(shard) for shard in cache.shards[:2])
    calls = []

    def counted(self, batch):
        calls.append(batch.row_ids)
        if len(calls) == before + 1:
            raise KeyboardInterrupt
        return online(self, batch)

    monkeypatch.setattr(OnlineFeatures, "__call__", counted)
    with pytest.raises(KeyboardInterrupt):
        cache.build()
    written = {path.name: path.stat().st_mtime_ns for path in cache.folder.iterdir()}
    assert sorted(written) == ["cache.json", "features-00000.safetensors", "features-00001.safetensors"]
    again = make_cache(tmp_path / "cut", target, rows_at_once=1)
    assert again.missing() == list(range(2, len(cache.shards)))
    again.build()
    assert len(calls) == before + 1 + sum(len(shard) for shard in cache.shards[2:])
    assert all((cache.folder / n).stat().st_mtime_ns == t for n, t in written.items() if n.startswith("features"))
    for i in range(len(cache.shards)):
        assert cache._path(i).read_bytes() == whole._path(i).read_bytes()


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_look_at_different_times_leave_nothing_out(tmp_path, target, world):
    """A rank that comes late finds shards of the others written already; its own share does not move."""
    cache = make_cache(tmp_path, target)
    assert len(cache.shards) > world
    for rank in reversed(range(world)):
        cache.build(rank, world)
    assert not cache.missing()


def in_child(*works, before=lambda: None) -> list[str]:
    """Each work in a process of its own, started together -> what each said."""
    context = multiprocessing.get_context("fork")
    gate, said = context.Barrier(len(works)), [context.SimpleQueue() for _ in works]

    def live(work, queue):
        before()
        gate.wait(60)
        try:
            work()
            queue.put("done")
        except BaseException as error:
            queue.put(f"{type(error).__name__}: {error}")

    children = [context.Process(target=live, args=each) for each in zip(works, said)]
    for child in children:
        child.start()
    found = [queue.get() for queue in said]
    for child in children:
        child.join()
    return found


def test_two_runs_building_at_once_leave_one_whole_cache(tmp_path, target):
    caches = [make_cache(tmp_path, target, tokens=12) for _ in range(3)]
    assert in_child(caches[0].build, caches[1].build) == ["done"] * 2
    cache = caches[2]
    assert not cache.missing() and len(list(tmp_path.iterdir())) == 1
    assert sorted(path.name for path in cache.folder.iterdir()) == ["cache.json"] + [
        f"features-{i:05d}.safetensors" for i in range(len(cache.shards))
    ]
    assert json.loads((cache.folder / "cache.json").read_text()) == cache.facts
    batch = collate(ROWS, 99)
    for ours, theirs in zip(*(own_tokens(batch, source(batch)) for source in (cache, cache.online))):
        assert (ours - theirs).norm() < 1e-6 * theirs.norm()


def test_half_written_files_are_never_read(tmp_path, target, monkeypatch):
    """What a killed build leaves has another name; a shard cut short by a crash of the machine is named."""
    cache = make_cache(tmp_path, target)
    cache.build()
    path = cache._path(1)
    path.rename(path.with_name(f".{path.name}.77.tmp"))
    assert cache.missing() == [1]
    cache.build()
    assert not cache.missing()
    path.write_bytes(path.read_bytes()[:-100])
    batch = collate(ROWS, 99)
    with pytest.raises(OSError, match=f"cache_dir=.*{path.name} cannot be read .*remove the file"):
        make_cache(tmp_path, target)(batch)
    path.unlink()
    again = make_cache(tmp_path, target)
    with pytest.raises(OSError, match=f"{path.name} cannot be read"):
        again(batch)
    again.build()
    assert again(batch)[0].hidden.shape[0] == len(ROWS)


def test_a_disk_without_room_is_told_before_anything_is_computed(tmp_path, target, monkeypatch):
    cache = make_cache(tmp_path, target)
    need = TOKENS * cache.bytes_per_token
    disk = SimpleNamespace(free=need - 1)
    monkeypatch.setattr(feature_cache.shutil, "disk_usage", lambda path: disk)
    with monkeypatch.context() as patch:
        forbid(patch)
        with pytest.raises(OSError, match=f"cache_dir={tmp_path}: .*{TOKENS} tokens.* lower data.limit.*online"):
            cache.build()
    disk.free = need
    cache.build()
    cache._path(0).unlink()
    disk.free = 24 * cache.bytes_per_token  # only what is missing counts
    make_cache(tmp_path, target).build()
    disk.free = 0
    make_cache(tmp_path, target).build()


def test_a_write_that_fails_leaves_the_shards_before_it(tmp_path, target, monkeypatch):
    """ENOSPC half through the second shard: the message names cache_dir and the remedy, and the build goes on."""
    cache = make_cache(tmp_path, target)

    def full(tensors, path):
        if "features-00001" in str(path):
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(feature_cache, "save_file", full)
        with pytest.raises(OSError, match=f"cache_dir={tmp_path}: features-00001.*No space left.*the same command"):
            cache.build()
    assert sorted(p.name for p in cache.folder.iterdir()) == ["cache.json", "features-00000.safetensors"]
    cache.build()
    assert not cache.missing()


def test_a_real_limit_on_file_size_stops_a_build_cleanly(tmp_path, target):
    """The write itself fails, inside safetensors: a first shard of few tokens fits, the second does not."""
    rows = [Row("a", [5], [6, 7]), Row("b", [5], [6] * 40)]
    cache = make_cache(tmp_path, target, rows, tokens=41)
    [said] = in_child(cache.build, before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000)))
    assert said.startswith("OSError: cache_dir=") and "features-00001" in said and "Make room" in said
    assert sorted(p.name for p in cache.folder.iterdir()) == ["cache.json", "features-00000.safetensors"]
    cache.build()
    assert not cache.missing() and cache(collate(rows, 99))[0].last.shape == (2, 41, 32)


def test_duplicate_names_are_refused(tmp_path, target):
    with pytest.raises(ValueError, match="two rows are called row-0"):
        make_cache(tmp_path, target, [*ROWS, ROWS[0]])


def memory_in_use() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_opening_reads_no_more_than_what_is_asked_for(tmp_path, target):
    """A shard of 77 MB, of which one short row is read: the process grows by far less."""
    rows = [Row("a", [5], [6] * 9), Row("b", [5], [6] * 199_999)]
    cache = make_cache(tmp_path, target, rows, tokens=1 << 20, max_length=1 << 20)
    cache.folder.mkdir(parents=True)
    size = cache.num_tokens
    save_file({"hidden": torch.ones(size, 64), "last": torch.ones(size, 32)}, cache._path(0))
    batch, before = collate(rows[:1], 99), memory_in_use()
    assert cache(batch)[0].hidden.sum() == 640
    assert memory_in_use() - before < 10 << 20

    def whole() -> int:
        start, read = memory_in_use(), load_file(cache._path(0))["hidden"].clone()
        return memory_in_use() - start - read.nbytes

    # the count sees a file that is read; where memory is short the system takes back other pages meanwhile, so thrice
    assert max(whole() for _ in range(3)) >= 0


# --- the key ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def at(tmp_path_factory):
    """Targets that differ in one thing each, and rows on disk."""
    at = tmp_path_factory.mktemp("key")
    save_model(at / "same")
    save_model(at / "weights", seed=5)
    save_model(at / "template", template=TEMPLATE + "{# renders the same #}")
    save_model(at / "tokenizer")
    other = byte_tokenizer()
    other.add_tokens(["zebra"])
    other.save_pretrained(at / "tokenizer")
    write_rows(at / "rows.jsonl")
    write_rows(at / "edited.jsonl")
    return at


def write_rows(path: Path, **edit):
    records = [{"id": row.id, "prompt_ids": row.prompt_ids, "response_ids": row.response_ids} for row in ROWS]
    records[4].update(edit)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


class Trainings:
    """The real way from settings to a run, each in a folder of its own; one folder of features for all."""

    def __init__(self, at: Path, folder: Path):
        self.at, self.folder, self.count = at, folder, 0

    def __call__(self, *overrides) -> Run:
        self.count += 1
        given = {"target.name": self.at / "same", "data.path": self.at / "rows.jsonl", "features": "cached"}
        given |= {"cache_dir": self.folder / "features", "out": self.folder / f"run-{self.count}", "device": "cpu"}
        given |= {"drafter.mask_token_id": 299, "drafter.target_layer_ids": "[0,2]", "max_length": 64}
        given |= dict(text.split("=", 1) for text in overrides)
        configs = str(Path(build.__file__).resolve().parents[1] / "configs")
        with initialize_config_dir(configs, version_base=None):
            cfg = compose("train", ["+exp=tiny", *(f"{key}={value}" for key, value in given.items())])
        return build.training(cfg, say=lambda text: None)[0]


@pytest.fixture
def trainings(at, tmp_path):
    return Trainings(at, tmp_path)


CHANGES = [
    "target.name={at}/weights",
    "target.name={at}/template",
    "target.name={at}/tokenizer",
    "target.dtype=float32",
    "thinking=true",
    "max_length=10",
    "drafter.target_layer_ids=[0,1]",
    "+drafter.draft_vocab_size=50",
    "data.limit=7",
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_numbers_depend_on_makes_a_new_key(trainings, at, change):
    """Weights, type, template text, tokenizer, thinking flag, length, layers, draft vocabulary, rows."""
    first, changed = trainings().source, trainings(change.format(at=at)).source
    assert changed.folder != first.folder and not changed.missing() and not first.missing()


def test_what_they_do_not_depend_on_hits_the_same_cache(trainings, monkeypatch):
    """Anchors, held-out rows, learning rate, seed, packing, head and objective: nothing is written again."""
    first = trainings().source
    monkeypatch.setattr(feature_cache, "save_file", None)
    others = ("max_anchors=2", "eval_rows=3", "lr=1", "seed=5", "batch_size=1", "packing=true")
    assert trainings(*others, "head=none", "objective=dflash_b8").source.folder == first.folder


def test_one_edited_line_makes_a_new_key(trainings, at):
    """The same path, the same length, another id in one answer."""
    given = f"data.path={at / 'edited.jsonl'}"
    first = trainings(given).source.folder
    write_rows(at / "edited.jsonl", response_ids=[*ROWS[4].response_ids[:-1], 3])
    assert trainings(given).source.folder != first
    write_rows(at / "edited.jsonl")
    assert trainings(given).source.folder == first


@pytest.mark.parametrize("what, other", [("dtype", torch.bfloat16), ("tokens", 30), ("reduced", True)])
def test_the_form_of_the_files_is_in_the_key(tmp_path, target, what, other):
    """Type, size of the shards, log_norm or not."""
    assert make_cache(tmp_path, target, **{what: other}).folder != make_cache(tmp_path, target).folder


def test_the_version_of_the_format_is_in_the_key(tmp_path, target, monkeypatch):
    old = make_cache(tmp_path, target).folder
    monkeypatch.setattr(feature_cache, "FORMAT", feature_cache.FORMAT + 1)
    assert make_cache(tmp_path, target).folder != old


@pytest.mark.parametrize("packing", ["false", "true"])
def test_training_from_disk_is_training_online(trainings, packing):
    """From the settings on: losses of two steps, and of the held-out rows; the target's layers are free by then."""
    told = []
    for features in ("online", "cached"):
        more = ("target.dtype=float64", "max_length=40", "batch_size=1")  # fp64: no rounding to bf16 flips
        run = trainings(f"features={features}", f"packing={packing}", *more)
        facts = [run.train_step(), run.train_step(), run.evaluate()]
        told.append({f"{i}/{name}": v for i, step in enumerate(facts) for name, v in step.items() if "loss/" in name})
    assert told[0].keys() == told[1].keys() and len(told[0]) > 10
    assert told[0] == pytest.approx(told[1], rel=1e-5)
    assert next(run.trainee.drafter.target.body.layers.parameters()).is_meta
    assert isinstance(run.source(run.micro_batches(0)[0][0])[0], Features)
