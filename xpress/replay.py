"""What a replay is: methods that answered one prompt, round by round, each round with the moment at which it was known.

It needs no model and no tokenizer any more: the terminal (replay_screen.py) and the page (replay_page.py) show the same
scenes.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from xpress.decode import Response, Round
from xpress.metrics import Counts

REACH = 24  # tokens before a draft that its text may depend on
UNKNOWN = "\ufffd"


@dataclass(frozen=True)
class Token:
    """A piece of text and what became of its token: accepted, bonus (the target's own), rejected, or cut (accepted, but
    past the stop token or the limit)."""

    text: str
    kind: str


@dataclass(frozen=True)
class Scene:
    """A round as people see it. at: seconds since the first token was known; tokens: emitted; drafted: all G of them.
    The opening scene (the first token, no round) has round None."""

    at: float
    tokens: list[Token]
    drafted: list[Token]
    round: Round | None

    @property
    def rejected(self) -> list[Token]:
        return [token for token in self.drafted if token.kind == "rejected"]


@dataclass
class Recording:
    """One method's response. ids: new tokens; text: their text; difference: from plain autoregression, as
    `evaluate.first_difference` has it (None: none, or not looked for)."""

    name: str
    about: str
    passes: int | str | None
    ids: list[int]
    text: str
    scenes: list[Scene]
    difference: dict | None = None

    @property
    def seconds(self) -> float:
        return self.scenes[-1].at

    def visible(self, t: float = math.inf) -> list[Scene]:
        """What is known t seconds after the first token. At the very beginning of the clock: nothing yet."""
        return [scene for scene in self.scenes if t > 0 and scene.at <= t]

    def progress(self, t: float = math.inf) -> dict:
        """The numbers of a pane after t seconds; at the end they are those of the summary. None: no round yet."""
        scenes = self.visible(t)
        rounds = [scene.round for scene in scenes if scene.round]
        tokens = sum(len(scene.tokens) for scene in scenes)
        counts = Counts.of(Response([0] * tokens, rounds))
        seconds = min(t, self.seconds)
        return {
            "tokens": tokens,
            "rounds": len(rounds),
            "tau": counts.tau,
            "passes_used": sum(counts.passes) / len(rounds) if rounds and self.passes is not None else None,
            "seconds": seconds,
            "tokens_per_second": (tokens - 1) / seconds if seconds > 0 and rounds else None,
            "done": t >= self.seconds and len(scenes) == len(self.scenes),
        }


@dataclass
class Replay:
    """One prompt and a recording of each method, plain autoregression first. protocol: what the numbers depend on."""

    prompt: str
    recordings: list[Recording]
    protocol: dict

    @property
    def greedy(self) -> bool:
        return self.protocol["temperature"] == 0

    @property
    def seconds(self) -> float:
        """How long the slowest method took."""
        return max(recording.seconds for recording in self.recordings)

    @property
    def lossless(self) -> bool:
        """At temperature 0: no output differs from plain autoregression by more than a tie."""
        return all(r.difference is None or r.difference["tie"] for r in self.recordings)

    def summary(self) -> list[dict]:
        """A row for each method: its final numbers, the speed-up over plain autoregression, and the verdict."""
        rows, plain = [], self.recordings[0].progress()["tokens_per_second"]
        for recording in self.recordings:
            final = recording.progress()
            speed = final["tokens_per_second"]
            row = {"method": recording.name, "passes": recording.passes, **final}
            rows.append(row | {"speedup": speed / plain if speed and plain else None, "same": self.verdict(recording)})
        return rows

    def verdict(self, recording: Recording) -> str:
        """Whether the text is that of plain autoregression, in words."""
        if recording is self.recordings[0]:
            return "–"
        if not self.greedy:
            return "sampled"
        found = recording.difference
        if found is None:
            return "yes"
        gap = f"top-2 gap {found['gap']:.1e}"
        return f"no: token {found['at']}, a tie ({gap})" if found["tie"] else f"NO: token {found['at']} ({gap})"


# --- text ------------------------------------------------------------------------------------------------------------


def pieces(tokenizer, ids: list[int]) -> list[str]:
    """The text that each token adds; joined they are decode(ids). A character made of several tokens belongs to the
    one that completes it: those before it add nothing. Only a text that ends half-way keeps its replacement mark."""
    found, shown = [], ""
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:end], clean_up_tokenization_spaces=False)
        ready = text if end == len(ids) else text.rstrip(UNKNOWN)
        if ready.startswith(shown):
            found.append(ready[len(shown) :])
            shown = ready
        elif end < len(ids):  # an unfinished character also hides bytes before it: wait until they are back
            found.append("")
        else:
            keep = len(os.path.commonprefix([ready, shown]))
            for i, piece in enumerate(found):
                found[i], keep = piece[:keep], max(keep - len(piece), 0)
            found.append(ready[len("".join(found)) :])
    return found


def make_scenes(tokenizer, rounds: list[Round], at: list[float]) -> list[Scene]:
    """Rounds (the opening one first) and their moments -> scenes."""
    texts = pieces(tokenizer, [token for step in rounds for token in step.tokens])
    scenes, ids = [], []
    for step, moment in zip(rounds, at):
        opening = step.num_draft is None
        own, done = texts[len(ids) : len(ids) + len(step.tokens)], 0 if opening else step.num_accepted
        tokens = [Token(text, "accepted" if k < done else "bonus") for k, text in enumerate(own)]
        near = ids[-REACH:]
        drafted = pieces(tokenizer, near + step.drafted)[len(near) :]
        emitted = min(len(step.tokens), step.num_accepted)
        kinds = ["accepted"] * emitted + ["cut"] * (step.num_accepted - emitted)
        kinds += ["rejected"] * (len(drafted) - len(kinds))
        drafted = [Token(text, kind) for text, kind in zip(drafted, kinds)]
        scenes.append(Scene(moment, tokens, drafted, None if opening else step))
        ids += step.tokens
    return scenes
