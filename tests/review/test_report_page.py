"""The review page in a real browser: keys, filters, decisions, hostile names, a hundred thousand samples."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from catalogue_making import image, samples
from large_page import large_page
from review_making import ReviewBench, shown_in
from similar_making import SimilarBench

from pencil_scale.config.loader import load_config
from pencil_scale.labels.pins import read_pins
from pencil_scale.review.audit import read_audit, study
from pipelines import pin_labels

pytestmark = [pytest.mark.browser, pytest.mark.slow]

NAMES = ("chromium", "chromium-browser", "google-chrome")
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>&amp;\"'`"  # as a class, and in a key
HOSTILE_KEY = f"a{HOSTILE}"
PATIENCE_MS = 120_000  # the machine may be busy


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser here (looked for {', '.join(NAMES)}); on Debian: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        # A container may not create the namespaces of Chromium's sandbox; these pages are our own.
        started = driver.chromium.launch(
            executable_path=found, args=["--no-sandbox", "--disable-dev-shm-usage"], timeout=PATIENCE_MS
        )
        yield started
        started.close()


class Reader:
    """A person at the page; console messages and network requests are recorded."""

    def __init__(self, browser: Any, path: Path) -> None:
        self.context = browser.new_context(viewport={"width": 1200, "height": 800}, accept_downloads=True)
        self.context.set_default_timeout(PATIENCE_MS)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda said: self.complaints.append(said.text))
        self.page.on("dialog", lambda dialog: self.complaints.append(f"{dialog.message} was run"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready]")

    def press(self, keys: str) -> None:
        for key in keys.split():
            self.page.keyboard.press(key)

    def wait_until(self, condition: str) -> None:
        """Ask again and again from outside: the page's policy forbids the driver to `eval` inside it."""
        until = time.monotonic() + PATIENCE_MS / 1000
        while not self.page.evaluate(condition):
            assert time.monotonic() < until, f"never came true: {condition}"
            self.page.wait_for_timeout(50)

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def current(self) -> str:
        """The id of the sample in the inspector."""
        return str(self.page.locator("#inspector .facts dd").first.inner_text())

    def save(self, folder: Path) -> Path:
        with self.page.expect_download() as coming:
            self.page.click("#save")
        path = folder / coming.value.suggested_filename
        coming.value.save_as(path)
        return path


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> ReviewBench:
    """Thirty samples, one with a hostile key and given class, six of them changed."""
    found = ReviewBench(tmp_path_factory.mktemp("page"))
    (found.folder / "classes.txt").write_text(f"ant\n{HOSTILE}\ncat\n")
    found.shard("00041.tar", samples(range(29)))
    found.shard("00042.tar", [(f"{HOSTILE_KEY}.png", image(200)), (f"{HOSTILE_KEY}.cls", b"0")])
    found.index()
    moved = {1: 2, 4: 2, 7: 0, 10: 0, 13: 2, 29: 1}
    found.publish({1: 2, 4: 0, 7: 0}, name="night-1")
    found.publish(moved, shares={1: 0.9, 4: 0.5, 7: 0.7, 10: 0.6, 13: 0.8})
    given = [row % 3 for row in range(29)] + [0]
    found.keep_history({5: given, 6: [moved.get(row, one) for row, one in enumerate(given)]})
    figures = {"corrected_share": 0.2, "label_entropy": 0.5, "stage": "pencil", "label_accuracy_n": 9}
    accuracy = {"given_label_accuracy": 0.6, "corrected_label_accuracy": 0.9, "test_accuracy": 1.0}
    found.keep_figures([{"epoch": epoch, **figures, **accuracy} for epoch in range(3)])
    found.report("report.since=night-1")
    return found


@pytest.fixture
def reader(browser: Any, bench: ReviewBench) -> Iterator[Reader]:
    found = Reader(browser, bench.page)
    yield found
    found.context.close()
    assert found.complaints == []
    assert [url for url in found.requests if not url.startswith(("file:", "data:", "blob:"))] == []


def test_the_saved_file_pins_exactly_what_was_judged_with_keys(reader: Reader, bench: ReviewBench) -> None:
    judged = {}
    for keys, verdict in (
        ("a", "accept"),
        ("r", "reject"),
        ("l c a t Enter", "relabel or accept"),
        ("j j", ""),
    ):
        if verdict:
            judged[reader.current()] = verdict
        reader.press(keys)
    assert reader.text("#tally").startswith("3 judged")
    reader.page.fill("#by", "ada")
    reader.press("Tab")
    entries = json.loads(reader.save(bench.folder).read_text())["decisions"]
    assert {entry["sample_id"] for entry in entries} == set(judged)
    path = bench.folder / "decisions-t.json"
    summary = pin_labels.run(load_config(bench.config, [f"pin.file={path}", "pin.by=ada"]))
    assert (summary.num_new, summary.num_dropped) == (3, 0)
    shown = shown_in(bench.page)["samples"]["id"]
    pins = {
        pin["sample_id"]: (pin["class"], pin["note"]) for pin in read_pins(bench.storage).table.to_pylist()
    }
    assert pins == {entry["sample_id"]: (entry["class"], entry["note"]) for entry in entries}
    assert set(pins) <= set(shown)
    by_verdict = {entry["verdict"]: entry for entry in entries}
    assert by_verdict["accept"]["class"] == by_verdict["accept"]["suggested"]
    assert by_verdict["reject"]["class"] == by_verdict["reject"]["given"]


def test_a_name_typed_after_judging_is_saved_with_every_decision_that_has_none(
    reader: Reader, tmp_path: Path
) -> None:
    reader.press("a r")
    reader.page.fill("#by", "ada")
    reader.page.reload()  # the name is kept in the browser, as the decisions are
    reader.page.wait_for_selector("html[data-ready]")
    reader.press("j j a")
    reader.page.fill("#by", "bob")
    entries = json.loads(reader.save(tmp_path).read_text())["decisions"]
    assert [entry["by"] for entry in entries] == ["ada"] * 3


def test_the_page_names_the_file_it_saves_and_no_axis_exceeds_100_percent(reader: Reader) -> None:
    assert "pin.file=decisions-t.json" in reader.text("footer")
    chart = reader.page.locator("#curves figure", has_text="Network accuracy")  # 100 % in every epoch
    ticks = [
        float(tick.rstrip("%\u202f\u00a0 "))
        for tick in chart.locator(".tick[text-anchor=end]").all_text_contents()
    ]
    assert len(ticks) > 1
    assert max(ticks) == 100


def test_next_previous_and_undo_do_what_they_say(reader: Reader) -> None:
    first = reader.current()
    reader.press("j")
    second = reader.current()
    reader.press("k")
    assert (reader.current(), second) == (first, second)
    assert second != first
    reader.press("a k u")
    assert reader.text("#tally") == "Nothing judged yet"
    assert reader.page.is_disabled("#save")
    reader.press("?")
    assert reader.page.is_visible("#help")
    reader.press("Escape a")
    assert reader.text("#tally") == "1 judged: 1 accepted"


def test_a_text_that_matches_no_class_selects_nothing_and_none_must_be_chosen(reader: Reader) -> None:
    reader.press("l z z Enter")
    assert reader.page.is_visible("#picker")
    reader.press("Escape")
    assert not reader.page.is_visible("#picker")
    assert reader.text("#tally") == "Nothing judged yet"
    reader.press("l ArrowUp Enter")
    assert reader.text("#tally") == "1 judged: 1 none of the classes"


def test_decisions_survive_a_reload_and_can_be_loaded_from_the_saved_file(
    reader: Reader, bench: ReviewBench, tmp_path: Path
) -> None:
    reader.press("a r")
    file = reader.save(tmp_path)
    reader.page.reload()
    reader.page.wait_for_selector("html[data-ready]")
    assert reader.text("#tally") == "2 judged: 1 accepted, 1 rejected"
    reader.press("u j u")
    assert reader.text("#tally") == "Nothing judged yet"
    reader.page.set_input_files("#load-file", file)
    reader.wait_until("document.querySelector('#tally').textContent.startsWith('2 judged')")


def test_filters_by_class_transition_score_and_state_show_what_they_say(reader: Reader) -> None:
    assert reader.text("#shown") == "30 of 30 listed"
    reader.page.select_option("#f-kind", "changed")
    assert reader.text("#shown") == "6 of 30 listed"
    reader.page.select_option("#f-given", "1")
    assert reader.text("#shown") == "5 of 30 listed"
    reader.page.select_option("#f-suggested", "2")
    assert reader.text("#shown") == "3 of 30 listed"
    reader.page.click("#f-clear")
    reader.page.fill("#f-high", "0.1")  # the new class has 0.8 or more, so the given one at most 0.1
    assert reader.text("#shown") == "3 of 30 listed"
    reader.page.click("#f-clear")
    reader.page.fill("#f-text", "ALERT(1)")
    assert reader.text("#shown") == "1 of 30 listed"
    reader.page.click("#f-clear")
    reader.page.select_option("#f-kind", "moved")
    assert reader.text("#shown") == "4 of 30 listed"  # row 4 has another new class; 10, 13 and 29 changed
    reader.page.select_option("#f-kind", "kept")
    assert reader.text("#shown") == "24 of 30 listed"
    reader.page.fill("#f-high", "0.1")
    assert "No listed sample matches" in reader.text("#list")
    reader.page.click("#f-clear")
    reader.page.locator("body").click(position={"x": 2, "y": 2})
    reader.press("a")
    reader.page.select_option("#f-state", "done")
    assert reader.text("#shown") == "1 of 30 listed"


def test_samples_are_ranked_by_doubt_and_say_whether_they_were_changed_or_kept(reader: Reader) -> None:
    fates = reader.page.locator(".card .fate").all_text_contents()
    assert fates[:6] == ["changed"] * 6
    assert set(fates[6:]) == {"kept"}
    shares = reader.page.locator(".card .pair p:first-child .share").all_text_contents()
    assert shares[:6] == ["5 %", "10 %", "10 %", "15 %", "20 %", "25 %"]
    reader.page.select_option("#f-order", "sure")
    sure = reader.page.locator(".card .pair .is .share").all_text_contents()[:6]
    assert sure == ["90 %", "80 %", "80 %", "70 %", "60 %", "50 %"]
    reader.page.select_option("#f-kind", "kept")
    assert (
        " ".join(reader.page.locator(".card .pair").nth(1).inner_text().split()) == "cat 80 % maybe ant 10 %"
    )


def test_the_original_of_a_sample_is_named_and_its_small_picture_has_crisp_pixels(
    reader: Reader, bench: ReviewBench
) -> None:
    reader.page.fill("#f-text", "000013")
    facts = reader.page.locator("#inspector .facts dd").all_text_contents()
    assert str(bench.folder / "00041.tar") in facts
    assert "000013.png" in facts
    reader.page.wait_for_selector("#inspector img.tiny")
    look = "(name) => getComputedStyle(document.querySelector('#inspector img'))[name]"
    assert [reader.page.evaluate(look, name) for name in ("imageRendering", "objectFit")] == [
        "pixelated",
        "contain",
    ]


def test_photos_are_shown_at_224_pixels_and_no_two_class_names_look_the_same(
    browser: Any, tmp_path: Path
) -> None:
    bench = ReviewBench(tmp_path)
    names = [
        f"women's long-sleeved pullover made of {thing}, navy blue" for thing in ("cotton", "cotten", "wool")
    ]
    (tmp_path / "classes.txt").write_text("\n".join(names) + "\n")
    photos = [
        (f"{n}.{kind}", data)
        for n in range(6)
        for kind, data in (("jpg", image(n, "JPEG", size=300)), ("cls", b"%d" % (n % 3)))
    ]
    bench.shard("00041.tar", photos)
    bench.index()
    bench.publish({0: 1, 1: 0, 2: 0})
    bench.report()
    reader = Reader(browser, bench.page)
    reader.wait_until("document.querySelector('.card img').complete")
    size = """() => {
        const one = document.querySelector('.card img');
        return [one.naturalWidth, one.clientHeight, getComputedStyle(one).objectFit];
    }"""
    assert reader.page.evaluate(size) == [224, 224, "scale-down"]
    for shown in (".card .pair .name", "#inspector .shares .name", "#matrix .axis"):
        texts = set(reader.page.locator(shown).all_text_contents())
        assert len(texts) == 3, (shown, texts)
        assert all(len(text) < 20 for text in texts)
    reader.context.close()


def test_epochs_are_counted_from_1_as_the_command_printed_them(reader: Reader) -> None:
    ticks = reader.page.locator("#inspector svg.history text.tick").all_text_contents()
    assert (ticks[0], ticks[-1]) == ("epoch 6", "7")
    axis = reader.page.locator("#curves figure").first.locator("text").all_text_contents()
    assert "1" in axis
    assert "0" not in axis


def test_clicking_a_cell_of_the_matrix_shows_its_samples(reader: Reader) -> None:
    reader.page.locator('[data-pair="1,2"] .heat').click()
    assert reader.text("#shown") == "3 of 30 listed"
    reader.page.locator(".flow").last.click()
    assert reader.text("#shown") != "30 of 30 listed"


def test_a_key_that_is_markup_is_shown_and_not_run(reader: Reader) -> None:
    reader.page.fill("#f-text", "onerror")
    assert reader.current() == HOSTILE_KEY
    assert HOSTILE in reader.page.locator("#inspector .pair").inner_text()
    assert HOSTILE in reader.page.locator("#by-class").inner_text()
    assert reader.page.title() == "Label review: t"
    assert reader.page.locator("#inspector script, #inspector img[onerror], #by-class script").count() == 0


def test_the_policy_forbids_network_and_foreign_scripts(browser: Any, bench: ReviewBench) -> None:
    reader = Reader(browser, bench.page)
    tries = """async () => {
        const blocked = [];
        const note = (event) => blocked.push(event.effectiveDirective);
        document.addEventListener('securitypolicyviolation', note);
        const script = document.createElement('script');
        script.textContent = "document.title = 'run'";
        document.body.append(script);
        const picture = document.createElement('img');
        picture.src = 'https://example.invalid/x.png';
        document.body.append(picture);
        await fetch('https://example.invalid/').catch(() => {});
        await new Promise((done) => setTimeout(done, 100));
        return [document.title, ...blocked.sort()];
    }"""
    found = reader.page.evaluate(tries)
    assert found == ["Label review: t", "connect-src", "img-src", "script-src-elem"]
    reader.context.close()


def test_the_page_and_the_command_line_give_the_same_audit_results(reader: Reader, tmp_path: Path) -> None:
    reader.page.click("#tab-audit")
    assert reader.text("#shown") == "30 drawn at random"
    reader.press("a r 1 1 1 2 1 1 2 1 1 1")  # the audit does not say what a and r would mean
    file = reader.save(tmp_path)
    audit = read_audit(str(file))
    changed, unchanged = audit.changed, audit.unchanged
    assert (changed.num_judged + unchanged.num_judged, changed.num_all, unchanged.num_all) == (10, 6, 24)
    findings = study(changed, unchanged)
    reader.page.click("#audit-panel summary")
    told = reader.page.locator(".gauge").all_inner_texts()
    for gauge, one in zip(told, (findings.precision, findings.missed, findings.remaining), strict=True):
        assert f"{100 * one.share:.1f} %" in gauge.partition("95 %")[0]
        assert f"95 % interval {100 * one.low:.1f} % to {100 * one.high:.1f} %" in gauge
    reader.press("j 1")
    assert reader.page.locator("#audit-panel details[open] .gauge").count() == 3
    assert "Skipped so far: 1." in reader.text("#audit-panel")


def test_the_audit_does_not_say_which_class_is_new(reader: Reader) -> None:
    reader.page.click("#tab-audit")
    seen = reader.text("#list") + reader.text("#inspector")
    for hint in ("changed", "kept", "→", "%", "score", "maybe"):
        assert hint not in seen
    reader.press("1 2 1 2")
    judged = reader.page.locator(".card.relabel").count()
    assert (judged, reader.page.locator(".card.accept, .card.reject").count()) == (4, 0)
    new_class = reader.page.evaluate("""() => {
        const data = JSON.parse(document.getElementById('data').textContent);
        const bytes = Uint8Array.from(atob(data.samples.predicted_label.data), (one) => one.charCodeAt(0));
        const labels = new Uint32Array(bytes.buffer);
        return data.audit.order.map((place) => data.classes[labels[place]]);
    }""")
    first = [
        reader.page.locator(".card .pair p:first-child").nth(card).get_attribute("title")
        for card in range(12)
    ]
    is_first = [one == other for one, other in zip(first, new_class[:12], strict=True)]
    assert 0 < sum(is_first) < 12  # neither always first nor always second


def test_the_page_follows_the_dark_or_light_preference(browser: Any, bench: ReviewBench) -> None:
    grounds = []
    for scheme in ("light", "dark"):
        context = browser.new_context(color_scheme=scheme)
        page = context.new_page()
        page.goto(bench.page.as_uri())
        grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        context.close()
    assert grounds == ["rgb(250, 248, 243)", "rgb(21, 22, 26)"]


def test_a_page_of_a_hundred_thousand_samples_stays_responsive(browser: Any, tmp_path: Path) -> None:
    reader = Reader(browser, large_page(tmp_path / "large.html"))
    assert reader.text("#shown") == "100,000 of 100,000 listed"
    dots = reader.page.locator("#curves figure", has_text="Reliability").locator("circle title")
    assert dots.all_text_contents()[-1] == "confidence 0.855: 76.0 % of 100 labels right"
    assert dots.count() == 10
    count = "document.querySelectorAll('.card').length"
    assert 0 < reader.page.evaluate(count) < 60
    reader.page.evaluate("document.querySelector('#list').scrollTop = 1e9")
    reader.wait_until("[...document.querySelectorAll('.card')].some((card) => card.offsetTop > 1e6)")
    assert reader.page.evaluate(count) < 60
    reader.page.select_option("#f-order", "restless")
    reader.press("a l")
    reader.page.fill("#picker-text", "number 777")
    reader.press("Enter j r")
    assert reader.text("#tally") == "3 judged: 1 accepted, 1 rejected, 1 relabelled"
    assert reader.page.is_visible("#overview")
    reader.page.select_option("#zoom-class", "5")
    assert reader.page.locator(".matrix .axis").count() == 40
    reader.page.select_option("#f-given", "5")
    shown = reader.text("#shown")
    assert shown.endswith("of 100,000 listed")
    assert shown != "100,000 of 100,000 listed"
    assert reader.complaints == []
    reader.context.close()


def test_a_page_without_labels_history_or_pictures_says_so(browser: Any, tmp_path: Path) -> None:
    bench = ReviewBench(tmp_path)
    bench.shard("a.tar", samples(range(3)))
    bench.index()
    bench.publish({}, visited=[])
    bench.report("report.thumbnails=0")
    reader = Reader(browser, bench.page)
    assert "Nothing to review: no label has been trained" in reader.text("#list")
    assert reader.text("#flows") == "No label has changed."
    assert "This run has no metrics by epoch." in reader.text("#curves")
    reader.press("a r l j")
    assert reader.text("#tally") == "Nothing judged yet"
    assert reader.complaints == []
    reader.context.close()


# --- what is similar ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def similar_page(tmp_path_factory: pytest.TempPathFactory) -> SimilarBench:
    """Digits of which rows 3, 4 and 100 look the same, and row 60 is an outlier."""
    found = SimilarBench(tmp_path_factory.mktemp("similar"))
    found.index_some()
    found.give_features()
    found.find()
    found.publish({3: 1, 4: 0})
    found.report("report.listed=6", "report.audit=0")
    return found


@pytest.fixture
def similar_reader(browser: Any, similar_page: SimilarBench) -> Iterator[Reader]:
    found = Reader(browser, similar_page.page)
    yield found
    found.context.close()
    assert found.complaints == []


def decisions_of(reader: Reader, folder: Path) -> dict[str, tuple[str | None, str]]:
    entries = json.loads(reader.save(folder).read_text())["decisions"]
    return {entry["sample_id"]: (entry["class"], entry["verdict"]) for entry in entries}


def only_first_two(reader: Reader) -> None:
    """Take all but the first two samples of "more like this" out of the group."""
    for number in range(2, reader.page.locator(".like .tile").count()):
        reader.page.locator(".like .tile").nth(number).click()


@pytest.mark.parametrize(
    ("button", "expected"),
    [
        ("Accept all", {"000003": "bee", "000004": "ant", "000100": "bee"}),
        ("Reject all", {"000003": "ant", "000004": "bee", "000100": "bee"}),
        ("Relabel all", {"000003": "cat", "000004": "cat", "000100": "cat"}),
    ],
)
def test_a_group_of_similar_samples_is_judged_at_once_and_can_be_pinned(
    similar_reader: Reader, similar_page: SimilarBench, tmp_path: Path, button: str, expected: dict[str, str]
) -> None:
    reader = similar_reader
    reader.page.fill("#f-text", "000003")
    only_first_two(reader)
    assert "the marked ones, 3 in all" in reader.text(".like")
    reader.page.click(f".like button:has-text('{button}')")
    if button == "Relabel all":
        reader.page.fill("#picker-text", "cat")
        reader.press("Enter")
    assert reader.text("#tally").startswith("3 judged")
    found = decisions_of(reader, tmp_path)
    assert {name: one for name, (one, _) in found.items()} == expected
    file = tmp_path / "decisions-t.json"
    summary = pin_labels.run(load_config(similar_page.config, [f"pin.file={file}", "pin.by=ada"]))
    assert (summary.num_pins, summary.num_dropped) == (3, 0)


def test_samples_that_were_judged_before_are_not_in_the_group(similar_reader: Reader, tmp_path: Path) -> None:
    reader = similar_reader
    reader.page.fill("#f-text", "000004")
    reader.page.click("#inspector .verdict.reject")
    assert reader.text("#tally") == "1 judged: 1 rejected"
    reader.page.fill("#f-text", "000003")
    assert reader.page.locator(".like .tile").first.get_attribute("aria-pressed") == "false"
    reader.page.click(".like button:has-text('Accept all')")
    found = decisions_of(reader, tmp_path)
    assert found["000004"] == ("bee", "reject")
    assert found["000003"] == ("bee", "accept")


def test_outliers_are_offered_as_none_of_these(similar_reader: Reader, tmp_path: Path) -> None:
    reader = similar_reader
    assert reader.page.locator("#inspector .verdict.none").count() == 0
    reader.page.select_option("#f-kind", "outlier")
    assert reader.current() == "000060"
    assert "outliers" in reader.text("#shown")
    assert "outlier" in reader.text("#inspector .fate")
    reader.page.click("#inspector .verdict.none")
    assert decisions_of(reader, tmp_path)["000060"] == (None, "none")
