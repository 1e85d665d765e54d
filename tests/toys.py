"""Toy targets, drafters with a known answer, and hand-made batches."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from xpress.anchors import Anchors, Batch, lay_out
from xpress.block import INFILL, LAYOUTS, Block
from xpress.data import Row
from xpress.decode import generate
from xpress.drafter import Context, DFlashDrafter
from xpress.drafter_config import DrafterConfig
from xpress.features import OnlineFeatures
from xpress.heads import ConfidenceHead, DominoHead, GatedMarkovHead, MarkovHead, Refiner, RNNMarkovHead
from xpress.loss import Term
from xpress.prompts import Prompt
from xpress.recipe import TrainSettings
from xpress.target import Target
from xpress.train import Run
from xpress.trainee import Trainee

V, D, L = 97, 32, 4
SHAPES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": None, "head_dim": 8},
}


class ToyTokenizer:
    """Just what rendering needs: ids of characters, a template with a thinking branch."""

    chat_template = "toy"
    eos_token_id = 2
    mask_token_id = None

    def apply_chat_template(self, messages, tokenize=False, add_generation_prompt=True, enable_thinking=True):
        text = "".join(f"<{m['role'][0]}>{m['content']}" for m in messages)
        return text + ("<a>" if add_generation_prompt else "") + ("" if enable_thinking else "<n>")

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [3 + ord(c) % (V - 4) for c in text]}

    def decode(self, ids, skip_special_tokens=False):
        """The letter of each id, so that encoding what was decoded gives the ids back."""
        letters = {3 + ord(c) % (V - 4): c for c in map(chr, range(33, 33 + V - 4))}
        return "".join(letters.get(i, "" if skip_special_tokens else "?") for i in ids)


def make_model(kind: str = "llama", seed: int = 0, dtype=torch.float32, **changes):
    """A random causal LM whose greedy answers vary (the scale of its weights is raised)."""
    torch.manual_seed(seed)
    settings = dict(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=48,
        num_hidden_layers=L,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.25,
    )
    config = AutoConfig.for_model(kind, **{**settings, **SHAPES.get(kind, {}), **changes})
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def make_target(kind: str = "llama", seed: int = 0, dtype=torch.float32, loop: str = "auto", **changes) -> Target:
    return Target(make_model(kind, seed, dtype, **changes), ToyTokenizer(), name=f"toy-{kind}", loop=loop)


def make_drafter(target, block_size=4, layout="infill", layers=2, seed=1, scale=4.0, **settings) -> DFlashDrafter:
    """A random dFlash drafter; `scale` spreads its weights so that drafts vary."""
    settings = {"target_layer_ids": (0, 2), "mask_token_id": V - 1, **settings}
    config = DrafterConfig.for_target(target, layers, block_size, layout=layout, **settings)
    torch.manual_seed(seed)
    drafter = DFlashDrafter(config)
    with torch.no_grad():
        for weight in drafter.parameters():
            if weight.dim() == 2:
                weight.mul_(scale)
    return drafter.to(target.dtype).bind(target).eval()


HEADS = {
    "refiner": Refiner,
    "markov": MarkovHead,
    "gated": GatedMarkovHead,
    "rnn": RNNMarkovHead,
    "domino": DominoHead,
}


def make_head(name: str, drafter, rank: int = 8, seed: int = 2, std: float = 0.5):
    """A random head of some strength; the refiner's mixer is random too."""
    config = drafter.config
    extra = {"gru_hidden_size": 12, "pure_slots": drafter.layout.first_slot + 1} if name == "domino" else {}
    torch.manual_seed(seed)
    head = HEADS[name](config.vocab_size, config.hidden_size, config.block_size, rank, config.draft_vocab_size, **extra)
    with torch.no_grad():
        for weight in head.parameters():
            weight.normal_(std=std)
    return head.to(drafter.fc.weight.dtype).bind(drafter.target).eval()


def make_confidence(head, drafter, seed: int = 9) -> ConfidenceHead:
    """A random confidence head beside a head with rows (or none). Where there are rows they decide, so that chances lie
    on both sides of a half: the hidden states of a toy hardly differ."""
    rank = head.token_embed.embedding_dim if hasattr(head, "token_embed") else 0
    confidence = ConfidenceHead(drafter.config.hidden_size, rank)
    torch.manual_seed(seed)
    hidden, rows = confidence.proj.weight.data.split([drafter.config.hidden_size, rank], 1)
    hidden.normal_(std=0.1 if rank else 0.3), rows.normal_(std=1.5)
    return confidence.to(drafter.fc.weight.dtype).eval()


def random_block(N=3, B=5, layout="infill", num_draft=None, dtype=torch.float64, seed=3, draft_ids=None) -> Block:
    """A block with a readout of its own, no target behind it."""
    torch.manual_seed(seed)
    layout = LAYOUTS[layout]
    V_draft = V if draft_ids is None else len(draft_ids)
    rows = torch.randn(V_draft, D, dtype=dtype)
    hidden = torch.randn(N, B, D, dtype=dtype)
    anchor, before = torch.randint(V, (2, N))
    num_draft = num_draft or layout.max_draft(B)
    return Block(hidden, anchor, before, layout, num_draft, lambda h: h @ rows.T, V, draft_ids)


def draft_hidden(drafter, target, prompt, anchor=7) -> torch.Tensor:
    """Hidden states [B,D] of the first draft after `prompt` and `anchor`."""
    drafter.reset()
    _, features = target.prefill([prompt], drafter.layer_ids)
    return drafter.draft(Context([[*prompt, anchor]], features)).hidden[0]


class ScriptedDrafter:
    """Drafts from a known continuation: right for the first `right(round)` tokens of a block, wrong after.

    It keeps count of the context as dFlash does, so that a cache out of step shows."""

    def __init__(self, target, prompt, answer, num_draft, right, layout=INFILL):
        self.target, self.prompt, self.answer, self.right = target, list(prompt), list(answer), right
        self.num_draft, self.layer_ids, self.round, self.layout = num_draft, (0,), 0, layout

    def reset(self):
        self.absorbed, self.round = 0, 0

    @property
    def lengths(self):
        return [self.absorbed]

    def select(self, rows):
        assert rows == []  # one sequence, which is finished

    def draft(self, context) -> Block:
        (so_far,) = context.ids
        self.absorbed += context.target_hidden.shape[1]
        assert [self.absorbed] == [len(so_far) - 1] == self.target.sequences.lengths
        done = len(so_far) - len(self.prompt)
        good = self.right(self.round)
        self.round += 1
        ids = []
        for k in range(self.num_draft):
            true = self.answer[done + k] if done + k < len(self.answer) else 0
            ids.append(true if k < good else (true + 1) % V)
        logits = torch.nn.functional.one_hot(torch.tensor([[0] * self.layout.first_slot + ids]), V).float()
        anchor, before = torch.tensor([so_far[-1]]), torch.tensor([so_far[-2]])
        return Block(logits, anchor, before, self.layout, self.num_draft, lambda hidden: hidden, V)


class TutoredDrafter:
    """A real dFlash drafter, told the answer: its base logits are raised beyond any head's reach for the first
    `right(round)` tokens of a block, and by `hint` for the rest, so that head and passes decide there."""

    def __init__(self, drafter, prompt, answer, right, hint=3.0):
        self.drafter, self.start, self.answer, self.right, self.hint = drafter, len(prompt), answer, right, hint
        self.layer_ids, self.blocks = drafter.layer_ids, []

    def reset(self):
        self.drafter.reset()
        self.round = 0

    @property
    def lengths(self):
        return self.drafter.sequences.lengths

    def select(self, rows):
        self.drafter.select(rows)

    def draft(self, context) -> Block:
        block = self.drafter.draft(context)
        self.blocks.append(block)
        true = (self.answer + [0] * block.num_draft)[len(context.ids[0]) - self.start :][: block.num_draft]
        lift = torch.where(torch.arange(block.num_draft) < self.right(self.round), 1e4, self.hint)
        lift = torch.nn.functional.one_hot(torch.tensor(true), V) * lift[:, None]
        lift = lift if block.draft_ids is None else lift[:, block.draft_ids]
        self.round += 1
        return replace(block, readout=lambda hidden: block.readout(hidden) + lift)


@torch.no_grad()
def oracle(model, prompt, n) -> list[int]:
    """Greedy decoding by no code of ours: the whole prefix again for every token, no cache."""
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def plain(target, prompt, n, stop_ids=()):
    """Plain autoregression."""
    return generate(target, prompt, max_new_tokens=n, stop_ids=stop_ids).ids


def count_batch(T=12, documents=None, supervised_from=0) -> Batch:
    """COUNT data: x[i] = i, so that labels and positions can be read off by eye."""
    documents = torch.zeros(T, dtype=torch.long) if documents is None else torch.tensor(documents)
    starts = torch.cat([torch.tensor([True]), documents[1:] != documents[:-1]])
    positions = torch.arange(T) - torch.where(starts, torch.arange(T), 0).cummax(0).values
    supervised = torch.arange(T) >= supervised_from
    names = tuple(f"count-{d}" for d in range(int(documents.max()) + 1))
    return Batch(torch.arange(T)[None], positions[None], documents[None], supervised[None], [names])


DSPARK = [Term("refined", "gold"), Term("confidence", "confidence", loss={})]
XPRESS = [Term("refined", "gold"), Term("consistency", "self", 0.3, rounds=3), Term("anchor", "none", [0.6, 0.2])]


def make_rows(*lengths, prompt=3, seed=4) -> list[Row]:
    """Random prompts of `prompt` tokens and answers of these lengths, row-0, row-1, …"""
    torch.manual_seed(seed)
    ids = [torch.randint(3, V - 1, (prompt + n,)).tolist() for n in lengths]
    return [Row(f"row-{i}", own[:prompt], own[prompt:]) for i, own in enumerate(ids)]


def make_trainee(target, head="refiner", terms=XPRESS, train_drafter=True, seed=1, chunk=5, std=0.5, **settings):
    """A random drafter (`settings` are its own) and head under an objective."""
    drafter = make_drafter(target, seed=seed, **settings)
    head = make_head(head, drafter, seed=seed + 1, std=std)
    confidence = make_confidence(head, drafter) if any(term.feed == "confidence" for term in terms) else None
    return Trainee(drafter, head, terms, train_drafter, chunk, confidence)


def make_run(out, trainee, target, rows, held_out=(), facts=None, **changes) -> Run:
    options = {"steps": 6, "batch_size": 2, "max_anchors": 8, "lr": 1e-3, "train_drafter": trainee.train_drafter}
    source = OnlineFeatures(target, trainee.drafter.layer_ids, False, target.dtype)
    return Run(out, trainee, rows, source, TrainSettings(**{**options, **changes}), held_out, facts)


def anchors_at(batch: Batch, places: list[int], num_draft: int) -> Anchors:
    """Blocks at the same places of every sequence."""
    index = torch.tensor([places]).expand(len(batch.ids), -1)
    return lay_out(batch, index, torch.ones_like(index, dtype=torch.bool), num_draft)


TEXTS = [
    "Hi",
    "Add two numbers, please.",
    "Why?",
    "Name a colour",
    "A much longer question, with more words in it",
    "No",
]
PROMPTS = [Prompt(f"toy/{i}", "toy", [text]) for i, text in enumerate(TEXTS)]


def stopping_target(*stops, **changes):
    """A toy whose answers end: `stops` are its end-of-text ids, the first one the tokenizer's and its pad too."""
    target = make_target(**changes)
    target.tokenizer = ToyTokenizer()
    target.tokenizer.eos_token_id = target.tokenizer.pad_token_id = stops[0] if stops else None
    target.model.generation_config.eos_token_id = list(stops) or None
    return target
