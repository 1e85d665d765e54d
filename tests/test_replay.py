"""A replay: what is recorded, its text token by token, the panes, the page; and the page in a real browser."""

import io
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from browser import CHROMIUM, Page
from disk import byte_tokenizer, published_drafter, save_model
from hydra import compose, initialize_config_dir
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from test_scripts import Commands
from tokenizers import decoders
from toys import ScriptedDrafter, TutoredDrafter, make_drafter, make_head, make_target, plain

from xpress import Target, build, checkpoint, evaluate, load, replay_page, replay_record, replay_screen
from xpress.decode import Round
from xpress.heads import Refiner
from xpress.replay import Recording, Replay, make_scenes, pieces

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = byte_tokenizer()
HOSTILE = "</script><!-- <b>bold</b> &amp; \u2028 naïve\n\tdone — 日本語 🎉 __REPLAY__ \\n"
PROMPT = '<img src="http://nowhere.invalid/x.png">Why? </script><script>document.title = "broken"</script>'


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def told(name: str, text: str, num_draft=0, right=lambda r: 0, every=0.5, passes=None) -> Recording:
    """A method that writes `text`, with right(r) of its round r's draft accepted, a round every `every` seconds."""
    ids, rounds = ids_of(text), [Round(ids_of(text)[:1])]
    done = 1
    while done < len(ids):
        good = min(right(len(rounds)), num_draft, len(ids) - done)
        drafted = [ids[done + k] if k < good else 40 + k for k in range(num_draft)]
        tokens = ids[done : done + good + 1]
        rounds.append(Round(tokens, good, num_draft, 2 if passes else 0, drafted))
        done += len(tokens)
    scenes = make_scenes(TOKENIZER, rounds, [every * r for r in range(len(rounds))])
    return Recording(name, f"about {name}", passes, ids, TOKENIZER.decode(ids), scenes)


def make_told(text=HOSTILE, temperature=0.0) -> Replay:
    methods = [
        told("ar", text),
        told("drafter", text, 4, lambda r: r % 3, 0.8),
        told("refiner", text, 4, lambda r: 1 + r % 4, 1.0, "auto"),
    ]
    return Replay(PROMPT, methods, {"target": "toy", "temperature": temperature})


# --- text token by token ---------------------------------------------------------------------------------------------


class FallbackTokenizer:
    """Ids are bytes, decoded as SentencePiece does with byte fallback: a broken run of bytes loses them all."""

    def decode(self, ids, **_):
        words = [chr(i) if i < 128 else f"<0x{i:02X}>" for i in ids]
        return decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]).decode(words)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(3, len(TOKENIZER) - 1), max_size=14))
def test_pieces_of_any_ids_are_the_text(ids):
    """Any bytes at all, valid or not; and a replacement mark stays only where the whole text has one."""
    found = pieces(TOKENIZER, ids)
    assert len(found) == len(ids) and "".join(found) == TOKENIZER.decode(ids)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 255), max_size=10))
def test_pieces_of_a_byte_fallback_are_the_text(ids):
    tokenizer = FallbackTokenizer()
    found = pieces(tokenizer, ids)
    assert len(found) == len(ids) and "".join(found) == tokenizer.decode(ids)


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=8).filter(lambda text: "\ufffd" not in text))
def test_a_character_belongs_to_the_token_that_completes_it(text):
    """So at no moment does a text show half a character."""
    for tokenizer, ids in ((TOKENIZER, ids_of(text)), (FallbackTokenizer(), list(text.encode()))):
        found = pieces(tokenizer, ids)
        assert not any("\ufffd" in piece for piece in found) and "".join(found) == text


def test_a_character_of_four_tokens_comes_with_the_last():
    assert pieces(TOKENIZER, ids_of("a🎉b")) == ["a", "", "", "", "🎉", "b"]
    assert pieces(TOKENIZER, ids_of("a🎉")[:3]) == ["a", "", "\ufffd"]  # what the text itself ends with


def test_a_token_is_accepted_bonus_rejected_or_cut():
    a, b, c, d, e = ids_of("abcde")
    rounds = [Round([a]), Round([b, c], 1, 3, 2, [b, d, d]), Round([d], 2, 3, 2, [d, e, a])]
    opening, first, last = make_scenes(TOKENIZER, rounds, [0.0, 1.0, 2.0])
    kinds = lambda tokens: [(token.text, token.kind) for token in tokens]  # noqa: E731
    assert opening.round is None and kinds(opening.tokens) == [("a", "bonus")]
    assert kinds(first.tokens) == [("b", "accepted"), ("c", "bonus")]
    assert kinds(first.drafted) == [("b", "accepted"), ("d", "rejected"), ("d", "rejected")]
    assert kinds(last.tokens) == [("d", "accepted")]  # the limit: one accepted token and the bonus are past it
    assert kinds(last.drafted) == [("d", "accepted"), ("e", "cut"), ("a", "rejected")]


# --- recording -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded():
    """A toy target whose ids are bytes, and three methods that know some of its answer."""
    target, prompt, n = make_target(), [5, 9, 11], 24
    target.tokenizer = TOKENIZER
    answer = plain(target, prompt, n)
    scripted = ScriptedDrafter(target, prompt, answer, 4, lambda r: r % 4)
    drafter = make_drafter(target, block_size=5)
    tutored = TutoredDrafter(drafter, prompt, answer, lambda r: 1 + r % 3)
    methods = [("ar", "ar"), ("drafter", "drafter", scripted)]
    methods += [("refiner", "head", tutored, make_head("refiner", drafter), "auto")]
    methods = [(evaluate.Method(*method), "toy") for method in methods]
    rest = dict(max_new_tokens=n, sampling=replay_record.Sampling(), say=lambda text: None)
    return Replay("toy", replay_record.record_all(target, prompt, methods, **rest), {"temperature": 0.0}), answer


def test_rounds_are_recorded_as_they_were(recorded):
    replay, answer = recorded
    assert [r.name for r in replay.recordings] == ["ar", "drafter", "refiner"] and replay.lossless
    for recording in replay.recordings:
        times = [scene.at for scene in recording.scenes]
        assert recording.ids == answer and recording.difference is None
        assert times[0] == 0 and all(a < b for a, b in zip(times, times[1:])) and recording.seconds == times[-1]
        assert recording.text == TOKENIZER.decode(answer)
        assert "".join(token.text for scene in recording.scenes for token in scene.tokens) == recording.text
        assert [t for scene in recording.scenes for t in (scene.round.tokens if scene.round else answer[:1])] == answer
        for scene in recording.scenes[1:]:
            kinds = [token.kind for token in scene.drafted]
            assert len(kinds) == scene.round.num_draft
            assert sum(kind != "rejected" for kind in kinds) == scene.round.num_accepted
    assert all(scene.round.passes >= 1 for scene in replay.recordings[2].scenes[1:])


def test_numbers_on_the_way_end_as_the_summary(recorded):
    replay, answer = recorded
    for recording, row in zip(replay.recordings, replay.summary()):
        assert recording.progress(0.0) | {"seconds": 0, "done": False} == recording.progress(0.0)
        assert recording.progress(0.0)["tokens"] == recording.progress(0.0)["rounds"] == 0
        for k, scene in enumerate(recording.scenes[1:], 1):
            now = recording.progress(scene.at)
            accepted = [s.round.num_accepted for s in recording.scenes[1 : k + 1]]
            assert now["rounds"] == k and now["tau"] == pytest.approx(1 + sum(accepted) / k)
            assert now["done"] == (k == len(recording.scenes) - 1)
        assert row["tokens"] == len(answer) and row["seconds"] == recording.seconds
        assert row["tokens_per_second"] == pytest.approx((len(answer) - 1) / recording.seconds)
        assert row["speedup"] == pytest.approx(replay.recordings[0].seconds / recording.seconds)
    assert [row["same"] for row in replay.summary()] == ["–", "yes", "yes"]
    assert replay.summary()[0]["tau"] == 1 and replay.summary()[0]["passes_used"] is None


def test_another_text_is_said_and_fails_unless_it_is_a_tie():
    replay = make_told("abc")
    replay.recordings[1].difference = {"at": 2, "gap": 1e-5, "limit": 1e-3, "tie": True}
    assert replay.lossless and replay.verdict(replay.recordings[1]) == "no: token 2, a tie (top-2 gap 1.0e-05)"
    replay.recordings[1].difference |= {"gap": 0.5, "tie": False}
    assert not replay.lossless and replay.verdict(replay.recordings[1]) == "NO: token 2 (top-2 gap 5.0e-01)"


def test_one_token_is_a_replay_too():
    """The first token ends it: no round, no time, no number that divides by either."""
    replay = make_told("a")
    assert [row["tau"] for row in replay.summary()] == [row["speedup"] for row in replay.summary()] == [None] * 3
    assert all(r.progress()["done"] and not r.progress(0.0)["done"] for r in replay.recordings)


# --- the terminal ----------------------------------------------------------------------------------------------------


def drawn(replay, t, width=120, height=40, **settings) -> str:
    console = Console(width=width, height=height, file=io.StringIO(), record=True, force_terminal=True)
    console.print(replay_screen.picture(replay, t, console, **settings))
    return console.export_text()


def test_panes_fill_with_time():
    replay = make_told("the user asks how many of them there are")
    empty, middle, end = (drawn(replay, t) for t in (0.0, 1.7, replay.seconds))
    assert "tokens 0" in empty and "the" not in empty and "done" not in empty
    assert "tokens 0" not in middle and "done" not in middle and "K = auto" in middle
    assert end.count("✓ done in") == 3 and "passes 2.00" in end
    for recording in replay.recordings:
        text = replay_screen.pane_text(recording, replay.seconds).plain
        assert text == recording.text and f"tokens {len(recording.ids)} " in end


def test_rejected_tokens_are_struck_out_until_the_next_round():
    recording = make_told("the user asks how many").recordings[1]
    for k, scene in enumerate(recording.scenes[:-1]):
        text = replay_screen.pane_text(recording, scene.at + 0.01)
        struck = "".join(text.plain[s.start : s.end] for s in text.spans if "strike" in str(s.style))
        assert struck == "".join(token.text for token in scene.rejected) and bool(struck) == (k > 0)
        styles = {str(span.style) for span in text.spans}
        assert replay_screen.STYLES["bonus"] in styles
    assert not [s for s in replay_screen.pane_text(recording, recording.seconds).spans if "strike" in str(s.style)]


def test_a_narrow_terminal_stacks_the_panes_and_a_low_one_shows_the_last_lines():
    replay = make_told("the user asks how many of them there are, and the assistant answers " * 6)
    names = lambda text: [line for line in text.splitlines() if "refiner" in line]  # noqa: E731
    assert "drafter" in names(drawn(replay, 1.0))[0] and "drafter" not in names(drawn(replay, 1.0, width=60))[0]
    for width, height in ((120, 14), (60, 26)):
        low = drawn(replay, replay.seconds, width=width, height=height)
        assert len(low.splitlines()) < height and low.count("answers") >= 3 and low.count("✓ done") == 3
    whole = drawn(replay, replay.seconds, width=60, height=26, tall=True)
    assert len(whole.splitlines()) > 26 and whole.count("asks") == 18


def test_control_characters_of_a_model_do_not_reach_the_terminal():
    replay = make_told("a\x1b[2Jb\x07c\x7f[bold]d")
    text = drawn(replay, replay.seconds)
    assert "a␛[2Jb␇c␡[bold]d" in text and "\x1b[2J" not in text


class Watch:
    """A clock that only waiting moves."""

    def __init__(self, interrupt_at=None):
        self.now, self.interrupt_at = 0.0, interrupt_at

    def wait(self, seconds):
        self.now += seconds
        if self.interrupt_at is not None and self.now > self.interrupt_at:
            raise KeyboardInterrupt


def played(replay, watch, terminal=True, **settings):
    console = Console(width=120, height=40, file=io.StringIO(), force_terminal=terminal)
    done = replay_screen.play(replay, console, clock=lambda: watch.now, wait=watch.wait, **settings)
    replay_screen.print_summary(replay, console)
    return done, console.file.getvalue()


def test_playing_takes_the_recorded_time_over_the_speed():
    replay = make_told("the user asks")
    for speed in (1.0, 4.0):
        watch = Watch()
        done, text = played(replay, watch, speed=speed)
        assert done and watch.now == pytest.approx(replay.seconds / speed, abs=0.1) and "done in" in text


@pytest.mark.parametrize("settings", [{"speed": 0}, {"terminal": False}])
def test_without_a_terminal_or_speed_only_the_end_is_shown(settings):
    watch = Watch()
    done, text = played(make_told("the user asks"), watch, **settings)
    assert done and watch.now == 0 and text.count("done in") == 3 and "tokens 0" not in text


def test_ctrl_c_ends_the_playing_and_not_the_table():
    done, text = played(make_told("the user asks"), Watch(interrupt_at=1.0))
    assert not done and "speed-up" in text and "same text as ar" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is back


def test_the_table_fits_eighty_columns():
    console = Console(width=80, file=io.StringIO())
    replay_screen.print_summary(make_told("the user asks"), console)
    text = console.file.getvalue()
    assert all(name in text for name in ("method", "tokens/s", "speed-up", "drafter", "refiner")) and "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_above_temperature_zero_no_text_is_expected_to_agree():
    done, text = played(make_told("the user asks", temperature=0.7), Watch(), speed=0)
    assert "the texts differ by design" in text and text.count("sampled") >= 2 and "yes" not in text


# --- the page --------------------------------------------------------------------------------------------------------


class Scripts(HTMLParser):
    """The script elements of a page, and every address that an element of it names."""

    def __init__(self, text):
        super().__init__()
        self.found, self.addresses = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.inside = tag == "script"
        self.found += [""] if self.inside else []
        self.addresses += [value for name, value in attrs if name in ("src", "href", "action", "srcset", "poster")]

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if getattr(self, "inside", False):
            self.found[-1] += data


def test_nothing_in_a_text_can_leave_its_place(tmp_path):
    replay = make_told()
    text = replay_page.write_page(replay, tmp_path / "out.html").read_text(encoding="utf-8")
    page = Scripts(text)
    assert len(page.found) == 2 and not page.addresses and "http" not in page.found[1]
    assert json.loads(page.found[0]) == json.loads(json.dumps(replay_page.facts(replay)))
    assert json.loads(page.found[0])["prompt"] == PROMPT and page.found[0].isascii() and "<" not in page.found[0]
    assert all(method["text"] == HOSTILE for method in json.loads(page.found[0])["methods"])


def test_a_page_is_whole_and_new(tmp_path, monkeypatch):
    replay, path = make_told("abc"), tmp_path / "out.html"
    path.write_text("mine")
    with pytest.raises(ValueError, match="html=.*out.html: is there already and is not overwritten; give another name"):
        replay_page.write_page(replay, path)
    assert path.read_text() == "mine"
    with pytest.raises(FileNotFoundError, match="html=.*none/out.html: no folder .*none; make it"):
        replay_page.check_page(tmp_path / "none" / "out.html")
    with pytest.raises(ValueError, match="html=3: must be the name of a file"):
        replay_page.check_page(3)

    def full(file, text, **_):
        file.touch()
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space"):
        replay_page.write_page(replay, tmp_path / "other.html")
    assert [found.name for found in tmp_path.iterdir()] == ["out.html"]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (apt-get install chromium)")
def test_the_page_plays_in_a_browser(tmp_path):
    """Opened as a file: empty, playing, pausing, seeking, done; no error, no request."""
    replay = make_told()
    path = replay_page.write_page(replay, tmp_path / "out.html")
    page = Page(tmp_path / "profile")
    texts = "[...document.querySelectorAll('.text')].map((e) => e.textContent)"
    shown = "[...document.querySelectorAll('.text')].map((e) => e.textContent.length).join()"
    struck = "[...document.querySelectorAll('.text .rejected')]"
    try:
        page.call("Page.navigate", url=path.as_uri())
        page.until("document.readyState === 'complete' && document.querySelectorAll('.pane').length === 3")
        assert page.run(texts) == ["", "", ""] and page.run("get('prompt').textContent") == PROMPT
        assert page.run("document.title") == "xpress replay"
        assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(246, 247, 249)"

        page.run("get('speed').value = '2'; get('play').click()")
        page.until("time() > 2")
        page.call("Input.dispatchKeyEvent", type="keyDown", key=" ", code="Space", text=" ")
        page.call("Input.dispatchKeyEvent", type="keyUp", key=" ", code="Space")
        page.until("get('play').textContent === 'Play'")
        held, time = page.run(shown), page.run("time()")
        page.run("new Promise((done) => setTimeout(done, 250))")
        assert (page.run(shown), page.run("time()")) == (held, time) and 2 < time < replay.seconds
        for k, recording in enumerate(replay.recordings):  # at the moment that stands still, the same as in Python
            scenes = recording.visible(time)
            now = "".join(token.text for scene in scenes for token in scene.tokens)
            lost = "".join(token.text for token in scenes[-1].rejected)
            assert page.run(texts)[k] == now + lost
            assert page.run(f"panes[{k}].numbers.tau.textContent") == f"{recording.progress(time)['tau']:.2f}"
        assert page.run(f"{struck}.length") > 0
        assert page.run(f"{struck}.every((e) => getComputedStyle(e).textDecorationLine === 'line-through')")
        page.screenshot(tmp_path / "middle.png")

        page.run("get('scrub').value = 1.2; get('scrub').dispatchEvent(new Event('input'))")
        tokens = [recording.progress(1.2)["tokens"] for recording in replay.recordings]
        assert page.run("panes.map((pane) => Number(pane.numbers.tokens.textContent))") == tokens
        page.run("document.querySelectorAll('.rounds tbody tr')[2].click()")  # back and forth leaves nothing behind
        assert page.run("time()") == replay.recordings[1].scenes[3].at
        page.run("get('restart').click()")
        assert page.run(texts) == ["", "", ""] and page.run("time()") == 0

        page.run("get('speed').value = '50'; get('play').click()")
        page.until("document.querySelectorAll('.pane.done').length === 3")
        page.until("clock.since === null")
        assert page.run(texts) == [HOSTILE] * 3 and page.run(f"{struck}.length") == 0
        for k, row in enumerate(replay.summary()):
            assert page.run(f"panes[{k}].badge.textContent") == f"✓ done in {row['seconds']:.2f} s"
            assert page.run(f"panes[{k}].numbers.rounds.textContent") == str(row["rounds"])
            assert page.run(f"panes[{k}].numbers['tokens/s'].textContent") == f"{row['tokens_per_second']:.1f}"
        rows = [len(recording.scenes) - 1 for recording in replay.recordings[1:]]
        assert page.run("[...document.querySelectorAll('.rounds tbody')].map((e) => e.rows.length)") == rows

        page.look(420, 900, dark=True)
        assert page.run("document.documentElement.scrollWidth <= innerWidth")  # nothing sticks out of a narrow one
        assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(16, 20, 24)"
        page.screenshot(tmp_path / "end.png")
        assert all((tmp_path / name).read_bytes()[:4] == b"\x89PNG" for name in ("middle.png", "end.png"))
        bad = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded", "Page.javascriptDialogOpening")
        assert not [event for event in page.events if event["method"] in bad]
        asked = [e["params"]["request"]["url"] for e in page.events if e["method"] == "Network.requestWillBeSent"]
        assert asked == [path.as_uri()]
    finally:
        page.close()


# --- the program -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A toy target, a checkpoint with a head that names it, and a published drafter without one."""
    at = tmp_path_factory.mktemp("replay")
    target = Target.from_pretrained(str(save_model(at / "llama")))
    published_drafter(at / "z-lab", target)
    found = load(at / "z-lab", target)
    head = Refiner(**checkpoint.head_sizes(found.drafter.config), rank=8)
    torch.nn.init.normal_(head.readout.weight)
    checkpoint.save(at / "run", found.drafter, head, {"target": {"name": str(at / "llama")}})
    (at / "old.html").touch()
    return at


def replayed(world, *overrides, say=lambda text: None) -> Replay:
    usual = [f"checkpoint={world / 'run'}", "prompt='Why is the sky blue?'", "max_new_tokens=10", "device=cpu"]
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        cfg = compose("replay", overrides=[*usual, *overrides])
    return build.replaying(cfg, say)


@pytest.mark.parametrize("passes", [2, "auto", "sequential"])
def test_a_checkpoint_is_replayed_three_ways(world, passes):
    replay = replayed(world, f"passes={passes}")
    assert [(r.name, r.passes) for r in replay.recordings] == [("ar", None), ("drafter", None), ("refiner", passes)]
    assert replay.lossless and len({tuple(r.ids) for r in replay.recordings}) == 1
    assert len(replay.recordings[0].ids) <= 10 and replay.protocol["passes"] == passes
    assert replay.prompt == "Why is the sky blue?"
    if passes == 2:
        assert {scene.round.passes for scene in replay.recordings[2].scenes[1:]} == {2}


def test_without_a_head_two_are_left_and_it_is_said(world):
    said = []
    replay = replayed(world, f"checkpoint={world / 'z-lab'}", f"target.name={world / 'llama'}", say=said.append)
    assert [recording.name for recording in replay.recordings] == ["ar", "drafter"]
    assert any("the checkpoint has no head" in text for text in said)


def test_sampled_texts_are_those_of_the_seed(world):
    first, again, other = (replayed(world, "temperature=1", f"seed={seed}") for seed in (3, 3, 4))
    ids = lambda replay: [recording.ids for recording in replay.recordings]  # noqa: E731
    assert ids(first) == ids(again) != ids(other)
    assert all(r.difference is None for r in first.recordings) and first.verdict(first.recordings[1]) == "sampled"


BAD = [
    ("+typo=1", "unknown key typo; known are"),
    ("+target.typo=1", "unknown key target.typo"),
    ("prompt=''", "prompt is empty"),
    ("prompt=3", "prompt=3: must be text; quote it twice"),
    ("prompt=" + "long" * 400, "a prompt of .* tokens leaves no room in the target's context 1024"),
    ("passes=-1", "passes=-1: give a number of Jacobi passes"),
    ("passes=all", "passes='all'"),
    ("passes=0", "passes=0: that is the drafter alone, which has a pane anyway"),
    ("max_new_tokens=0", "max_new_tokens=0: must be a whole number from 1 up"),
    ("max_new_tokens=1e3", "max_new_tokens=1000.0: must be a whole number"),
    ("speed=-1", "speed=-1: must be a number from 0 up"),
    ("speed=fast", "speed=fast: must be a number"),
    ("speed=inf", "speed=inf: must be a number"),
    ("seed=x", "seed=x: must be a whole number"),
    ("temperature=hot", "temperature=hot: must be a number"),
    ("temperature=-1", "temperature=-1"),
    ("top_p=0", "top_p=0"),
    ("accept=all", "accept='all'"),
    ("dtype=fp8", "dtype=fp8: give float32"),
    ("html={world}/old.html", "html=.*old.html: is there already"),
    ("html={world}/none/out.html", "html=.*no folder"),
    ("checkpoint=nowhere", "checkpoint=nowhere: no config.json"),
    ("checkpoint={world}/z-lab", "does not name its target; give target.name="),
    ("target.name=nowhere", "target=nowhere: no such folder"),
]


@pytest.mark.parametrize("override, named", BAD, ids=[override[:30] for override, _ in BAD])
def test_a_bad_setting_is_named_before_any_work(world, monkeypatch, override, named):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(replay_record, "decode", None)
    with pytest.raises((ValueError, OSError), match=named):
        replayed(world, override.format(world=world))


def test_a_prompt_must_be_given(world):
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        with pytest.raises(ValueError, match="prompt is not given; add prompt="):
            build.replaying(compose("replay"))


def test_a_broken_provenance_is_named(world, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in (world / "run").iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / checkpoint.PROVENANCE).write_text("{")
    with pytest.raises(ValueError, match="broken/provenance.json: not valid JSON"):
        replayed(world, f"checkpoint={broken}")


def test_the_command_writes_a_page_and_prints_a_table(world, tmp_path):
    words = (f"checkpoint={world / 'run'}", "prompt=Why is the sky blue?", "max_new_tokens=8", "html=out.html")
    (done,) = Commands(tmp_path).together(("replay.py", *words))
    assert done.returncode == 0, done.stderr
    assert "page: out.html" in done.stdout and done.stdout.count("done in") == 3 and "speed-up" in done.stdout
    data = json.loads(Scripts((tmp_path / "out.html").read_text(encoding="utf-8")).found[0])
    assert data["prompt"] == "Why is the sky blue?" and [m["name"] for m in data["methods"]][0] == "ar"
