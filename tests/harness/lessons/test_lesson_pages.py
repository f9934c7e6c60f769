"""The lessons in a real browser: their logic equals the policy core, and anyone can use them offline."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
from tiers import cases, tier

from engine.core import BlockManager, OutOfBlocksError, PagedManager, Placement, Request
from engine.core.identity import TokenIdentity
from engine.core.memory.contiguous import ContiguousManager
from engine.core.options import Reservation
from harness.cli.main import main
from harness.lessons.pages import Recording, page, record
from harness.papers.sizes import blocks_at, first_step, lengths_of

pytestmark = pytest.mark.browser
LESSONS = ("pool", "accountant", "replay")
SEQUENCES = tier(200, 10_000)
PATIENCE_MS = 120_000  # a safety net on a busy machine
BOTH = cases("name", LESSONS, day=("replay",))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = tmp_path_factory.mktemp("lessons")
    for name in LESSONS:
        assert main(["lesson", name, "--out", str(found)]) == 0
    return found


@pytest.fixture
def opened(browser, folder) -> Iterator[Any]:
    """Opens a lesson in a tab that notes what it asks for and complains about."""
    contexts = []

    def open_page(name: str, width: int = 1280, scheme: str = "light") -> Any:
        context = browser.new_context(
            offline=True, viewport={"width": width, "height": 800}, color_scheme=scheme
        )
        context.set_default_timeout(PATIENCE_MS)
        contexts.append(context)
        tab = context.new_page()
        tab.requested, tab.complaints = [], []
        tab.on("request", lambda request: tab.requested.append(request.url))
        tab.on("console", lambda message: message.type == "error" and tab.complaints.append(message.text))
        tab.on("pageerror", lambda error: tab.complaints.append(str(error)))
        tab.goto((folder / f"{name}.html").as_uri())
        return tab

    yield open_page
    for context in contexts:
        context.close()


# -- the logic equals the core ---------------------------------------------------------------------------

RUN = """
([blocks, size, steps]) => {
  const pool = new BlockPool(blocks, size);
  return steps.map(([what, ...rest]) => {
    try {
      const answer = pool[what](...rest);
      return {answer: what === "cow" || what === "release" || what === "slots" ? answer : null, ...pool.state()};
    } catch (error) { return {refused: true, ...pool.state()}; }
  });
}
"""


def drawn(seed: int) -> tuple[int, int, list[list[Any]]]:
    """A pool and a sequence of operations; prompts often begin alike."""
    draw = random.Random(seed)
    blocks, size = draw.randint(3, 14), draw.choice((1, 2, 4, 5))
    stems = [[str(draw.randrange(90)) for _ in range(draw.randint(0, 4 * size))] for _ in range(3)]
    names: list[str] = []
    steps: list[list[Any]] = []
    for step in range(draw.randint(4, 16)):
        what = draw.choice(("add", "add", "append", "append", "fork", "cow", "release", "slots"))
        if what == "add" or not names:
            prompt = [
                *draw.choice(stems),
                *(str(draw.randrange(2)) for _ in range(draw.randint(0, size + 1))),
            ]
            steps.append(["add", f"s{step}", prompt or ["7"]])
            names.append(f"s{step}")
        elif what == "append":
            steps.append(["append", draw.choice(names), draw.randint(1, 2 * size)])
        elif what == "fork":
            steps.append(["fork", draw.choice(names), f"s{step}"])
            names.append(f"s{step}")
        elif what == "release":
            steps.append(["release", names.pop(draw.randrange(len(names)))])
        else:
            steps.append([what, draw.choice(names), *([[0]] if what == "slots" else [])])
    return blocks, size, steps


class Core:
    """The policy core under the operations of the page, with the states in the page's words."""

    def __init__(self, blocks: int, size: int) -> None:
        self.manager = BlockManager(blocks, size, prefix_caching=True)
        self.size = size
        self.known: dict[str, None] = {}
        self.words: dict[bytes, str] = {}

    def step(self, what: str, name: str, *rest: Any) -> dict[str, Any]:
        try:
            return {"answer": self.run(what, name, *rest), **self.state()}
        except (OutOfBlocksError, KeyError):
            return {"refused": True, **self.state()}

    def run(self, what: str, name: str, *rest: Any) -> Any:
        manager = self.manager
        if what == "add":
            ids = [int(word) for word in rest[0]]
            for index, found in enumerate(TokenIdentity(0, ids).prompt_hashes(self.size), start=1):
                self.words[found] = " ".join(rest[0][: index * self.size])
            manager.allocate(name, ids)
            self.known[name] = None
            return None
        if name not in self.known:
            raise KeyError(name)
        if what == "append":
            manager.allocate(name, rest[0])
        elif what == "fork":
            manager.share(name, rest[0])
            self.known[rest[0]] = None
        elif what == "cow":
            copied = manager.cow(name)
            return None if copied is None else list(copied)
        elif what == "release":
            gone = manager.free(name)
            del self.known[name]
            return gone[::-1]
        elif what == "slots":
            return manager.get_slot_mapping(name, rest[0])
        return None

    def state(self) -> dict[str, Any]:
        pool = self.manager.manager.pool
        self.manager.manager.check()
        blocks = range(1, pool.num_blocks + 1)
        return {
            "tables": {name: self.manager.table(name) for name in self.known},
            "tokens": {name: self.manager.tokens(name) for name in self.known},
            "refs": [pool.references(block) for block in blocks],
            "hash": [self.words.get(pool.hash_of(block)) for block in blocks],
            "queue": pool._evictable.blocks(),
            "free": pool.free_blocks,
            "next": pool._uncached[-8:][::-1],
        }


def core_states(blocks: int, size: int, steps: list[list[Any]]) -> list[dict[str, Any]]:
    core = Core(blocks, size)
    return [core.step(*step) for step in steps]


def test_the_pool_does_what_the_core_does(opened) -> None:
    tab = opened("pool")
    batch = 200
    for first in range(0, SEQUENCES, batch):
        drawings = [drawn(seed) for seed in range(first, min(SEQUENCES, first + batch))]
        found = tab.evaluate(f"all => all.map({RUN})", drawings)
        for drawing, states in zip(drawings, found, strict=True):
            assert states == core_states(*drawing), drawing


def test_the_draws_reach_every_kind_of_state() -> None:
    """Refusals, copies, hits on cached blocks and evictions: else equality would say little."""
    seen = dict.fromkeys(("refused", "copied", "cached", "shared", "evicted"), 0)
    for seed in range(300):
        before: dict[str, Any] | None = None
        for state in core_states(*drawn(seed)):
            seen["refused"] += "refused" in state
            seen["copied"] += bool(state.get("answer"))
            seen["cached"] += bool(state["queue"])
            seen["shared"] += max(state["refs"]) > 1
            if before is not None:
                gone = set(filter(None, before["hash"])) - set(filter(None, state["hash"]))
                seen["evicted"] += bool(gone)
            before = state
    assert min(seen.values()) > 20, seen


@cases(
    ("right", "wrong"),
    [
        ("(prompt.length - 1) / this.size", "prompt.length / this.size"),
        ("gone.reverse();", ""),
        ("if (!this.refs[block]) this.queue.splice(this.queue.indexOf(block), 1);", ""),
        ("one.tokens % this.size > 0 && ", ""),
    ],
    day=1,
)
def test_a_planted_mistake_in_the_page_is_seen(browser, folder, tmp_path, right: str, wrong: str) -> None:
    text = (folder / "pool.html").read_text(encoding="utf-8")
    assert right in text
    (tmp_path / "pool.html").write_text(text.replace(right, wrong), encoding="utf-8")
    context = browser.new_context(offline=True)
    tab = context.new_page()
    tab.goto((tmp_path / "pool.html").as_uri())
    drawings = [drawn(seed) for seed in range(100)]
    found = tab.evaluate(f"all => all.map({RUN})", drawings)
    context.close()
    assert any(states != core_states(*drawing) for drawing, states in zip(drawings, found, strict=True))


def accounted(prompt: int, output: int, size: int, pool: int, longest: int) -> dict[str, int]:
    """What the accountant says, from the managers of the core."""
    tokens = prompt + output - 1
    usage = blocks_at(size, [tokens])
    many = lengths_of(*[tokens] * (pool // tokens + 2))
    fits = {"paged": 0}
    if pool // size:
        fits["paged"] = _running(PagedManager(pool // size, size, prefix_caching=False), many)
    for reservation in Reservation:
        manager = ContiguousManager(pool, longest, reservation, Placement.auto)
        same = [Request(rid, prompt, output) for rid in range(pool // tokens + 2)]
        fits[reservation.value] = _running(manager, same)
    return {"blocks": usage.physical_blocks, "tail": usage.reserved + usage.internal, **fits}


def _running(manager: Any, requests: list[Request]) -> int:
    if manager.never_fits(requests[0]) is not None:
        return 0
    return first_step(manager, requests).running


def test_the_accountant_counts_as_the_core_does(opened) -> None:
    tab, draw = opened("accountant"), random.Random(0)
    cases = []
    for _ in range(150):
        longest = draw.choice((64, 256, 500))
        prompt = draw.randint(1, longest - 1)
        case = (
            prompt,
            draw.randint(1, longest),
            draw.choice((1, 3, 16, 64)),
            draw.randint(20, 3000),
            longest,
        )
        cases.append(case)
    script = """cases => cases.map(([prompt, output, size, poolTokens, maxLen]) => {
      const settings = {size, kvBytes: 2, poolTokens, maxLen};
      const {blocks, tail, paged, max, pow2, oracle} = account({prompt, output}, settings);
      return {blocks, tail, paged, max, pow2, oracle};
    })"""
    for case, found in zip(cases, tab.evaluate(script, cases), strict=True):
        assert found == accounted(*case), case


def test_the_replay_shows_what_was_recorded(opened) -> None:
    tab, recording = opened("replay"), record([])
    state, draw = [0] * (recording.num_blocks + 1), random.Random(0)
    asked = {draw.randrange(len(recording.times)) for _ in range(60)} | {0, len(recording.times) - 1}
    shown = tab.evaluate("steps => steps.map(step => [...run.at(step)])", sorted(asked))
    found = dict(zip(sorted(asked), shown, strict=True))
    for step in range(len(recording.times)):
        for place in range(recording.offsets[step], recording.offsets[step + 1]):
            state[recording.blocks[place]] = recording.codes[place]
        if step in asked:
            assert found[step] == state


@pytest.mark.nightly
def test_ten_thousand_blocks_and_a_hundred_thousand_changes_open(browser, tmp_path) -> None:
    draw, steps = random.Random(0), 2_000
    blocks = [draw.randint(1, 10_000) for _ in range(100_000)]
    codes = [draw.randint(0, 60) for _ in blocks]
    large = Recording(
        *("large", 10_000, 16, [step / 50 for step in range(steps)]),
        [50 * step for step in range(steps + 1)],
        *(blocks, codes, [30] * steps, [0] * steps),
        dict.fromkeys(range(30), (0.0, 10, 10)),
    )
    (tmp_path / "large.html").write_text(page("replay", large), encoding="utf-8")
    assert (tmp_path / "large.html").stat().st_size < 5_000_000
    context = browser.new_context(offline=True)
    tab = context.new_page()
    tab.goto((tmp_path / "large.html").as_uri())
    last = dict(zip(blocks, codes, strict=True))
    shown = tab.evaluate(f"[...run.at({steps - 1})]")
    assert [shown[block] for block in last] == list(last.values())
    tab.evaluate("go(1000)")
    assert tab.inner_text("#when").startswith("Step 1001 of 2000")
    context.close()


# -- anyone can use them ---------------------------------------------------------------------------------


@BOTH
def test_a_page_is_small_and_asks_for_nothing(opened, folder, name: str) -> None:
    tab = opened(name)
    assert (folder / f"{name}.html").stat().st_size < 500_000
    assert [url for url in tab.requested if not url.startswith(("file:", "data:"))] == []
    assert len([url for url in tab.requested if url.startswith("file:")]) == 1
    assert tab.complaints == []


@BOTH
@cases("scheme", ["light", "dark"], day=("dark",))
@cases("width", [400, 1280], day=(400,))
def test_a_page_has_no_fault_of_accessibility(opened, name: str, scheme: str, width: int) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed").Axe()
    found = axe.run(opened(name, width, scheme))
    assert [(fault["id"], fault["nodes"][0]["html"]) for fault in found.response["violations"]] == []


@BOTH
def test_a_page_fits_a_narrow_window(opened, name: str) -> None:
    tab = opened(name, 400)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 400


@pytest.mark.nightly
def test_the_keyboard_alone_adds_forks_and_frees(opened) -> None:
    tab = opened("pool")
    for button in ("add", "fork", "append", "free"):
        tab.focus(f"#{button}")
        tab.keyboard.press("Enter")
    assert "s1 ended" in tab.inner_text("#said")
    assert tab.locator(".cell.used").count() > 0


@pytest.mark.nightly
def test_copy_on_write_happens_before_your_eyes_and_can_be_taken_back(opened) -> None:
    tab = opened("pool")
    for button in ("add", "fork", "append"):
        tab.click(f"#{button}")
    assert "is shared, so it is copied" in tab.inner_text("#said")
    assert tab.locator("#challenges li").nth(1).get_attribute("class") == "won"
    tab.click("#back")
    assert tab.inner_text("#counts").startswith("5 of 24 blocks in use for 10")


@pytest.mark.nightly
def test_a_refusal_says_why(opened) -> None:
    tab = opened("pool")
    tab.fill("#blocks", "4")
    tab.dispatch_event("#blocks", "change")
    tab.click("#add")
    assert "need more blocks than the 4 of 4" in tab.inner_text("#said")


@pytest.mark.nightly
def test_answers_are_checked(opened) -> None:
    tab = opened("pool")
    item = tab.locator("#challenges li").nth(4)
    for given, reply in (("12", "Not 12"), ("8", "Right.")):
        item.locator("input").fill(given)
        item.locator("button").click()
        assert reply in item.inner_text()


@pytest.mark.nightly
def test_a_block_of_the_replay_has_a_history_and_a_request_its_blocks(opened) -> None:
    tab = opened("replay")
    tab.fill("#block", "1")
    tab.dispatch_event("#block", "change")
    assert "Block 1 changed" in tab.inner_text("#chosen")
    assert tab.locator("#history tr").count() > 1
    tab.select_option("#request", "0")
    assert "it has blocks 1," in tab.inner_text("#asked")


def both_sides() -> Recording:
    """Two short runs: the measured one ends later, and its pool is fuller at the same time."""
    parts: Any = {"label": "", "num_blocks": 4, "block_size": 16, "requests": {0: (0.0, 9, 9)}}
    parts |= {"running": [1, 1, 0], "waiting": [0, 0, 0]}
    predicted = Recording(times=[0.0, 1.0, 2.0], offsets=[0, 1, 1, 2], blocks=[1, 1], codes=[2, 0], **parts)
    return Recording(
        times=[0.0, 1.5, 4.0],
        offsets=[0, 1, 2, 2],
        blocks=[1, 2],
        codes=[2, 2],
        side="measured",
        beside=predicted,
        **parts,
    )


@pytest.fixture
def beside(browser, tmp_path) -> Iterator[Any]:
    (tmp_path / "both.html").write_text(page("replay", both_sides()), encoding="utf-8")
    context = browser.new_context(offline=True)
    tab = context.new_page()
    tab.goto((tmp_path / "both.html").as_uri())
    yield tab
    context.close()


def test_prediction_and_measurement_stand_at_the_same_time(beside) -> None:
    beside.evaluate("go(1)")
    assert beside.inner_text("#when").startswith(
        "Measured: step 2 of 3, 1.500 s: 1 requests run, 0 wait; 2 of 4"
    )
    assert beside.inner_text("#when-other").startswith(
        "Predicted: step 2 of 3, 1.000 s: 1 requests run, 0 wait; 1 of 4"
    )
    beside.evaluate("go(2)")
    assert "2 of 4 blocks" in beside.inner_text("#when")
    assert "Predicted: step 3 of 3, 2.000 s" in beside.inner_text("#when-other")
    assert "0 of 4 blocks" in beside.inner_text("#when-other")


@pytest.mark.nightly
def test_both_pools_have_the_same_size_and_colours(beside) -> None:
    same = beside.evaluate(
        "[canvas.width, canvas.height].join() === [el('pool-other').width, el('pool-other').height].join()"
    )
    assert same
    pixel = "id => [...el(id).getContext('2d').getImageData(3, 3, 1, 1).data].join()"
    assert beside.evaluate(pixel, "pool") == beside.evaluate(pixel, "pool-other")


@pytest.mark.nightly
def test_a_run_alone_shows_one_pool(opened) -> None:
    assert opened("replay").is_hidden("#other")


def test_the_accountant_opens_with_the_lengths_of_a_trace_file(browser, tmp_path) -> None:
    (tmp_path / "mine.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,40,10\n1,300,20\n")
    assert main(["lesson", "accountant", "--trace", str(tmp_path / "mine.csv"), "--out", str(tmp_path)]) == 0
    context = browser.new_context(offline=True)
    tab = context.new_page()
    tab.goto((tmp_path / "accountant.html").as_uri())
    assert tab.input_value("#lengths") == "40 10\n300 20"
    assert tab.input_value("#longest") == "320"
    assert tab.locator("#each tr").count() == 2
    context.close()


@pytest.mark.nightly
def test_the_replay_plays_to_its_end(opened) -> None:
    tab = opened("replay")
    tab.evaluate("go(run.steps - 40)")
    tab.click("#play")
    tab.wait_for_function("el('play').textContent === 'Play' && step === run.steps - 1")


def test_the_accountant_names_the_line_that_is_wrong(opened) -> None:
    tab = opened("accountant")
    tab.fill("#lengths", "10 20\n30")
    assert tab.inner_text("#wrong").startswith('line 2: "30" must be two whole numbers')


@pytest.mark.nightly
def test_the_accountant_reserves_nothing_for_what_is_longer(opened) -> None:
    tab = opened("accountant")
    tab.fill("#longest", "1000")
    tab.fill("#lengths", "401 100\n5000 0")
    said = tab.inner_text("#picture-says")
    assert "leaves 50.0 % of the reserved slots empty" in said
    assert "1 of 2 requests are longer than that" in said


@pytest.mark.nightly
def test_the_accountant_takes_the_lengths_of_a_workload(opened) -> None:
    tab = opened("accountant")
    tab.select_option("#workload", "sosp23_alpaca")
    assert tab.locator("#each tr").count() == 200
    assert tab.locator("#plot polyline").count() == 2
