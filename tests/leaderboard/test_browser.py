"""The leaderboard's pages in a real browser, opened from file://, with a mouse, and by keyboard alone.

Every test also demands an empty console and that nothing but files of the site was loaded. Skipped where selenium, Chromium or
its driver is missing (Debian: `apt-get install chromium chromium-driver`).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from boards import HOSTILE_NAMES, HOSTILE_TEXT, column_id, model_id, synthetic_board

from harness_ext.leaderboard import statistics
from harness_ext.leaderboard.build import build_board
from harness_ext.leaderboard.cache import Cache
from harness_ext.leaderboard.compare import compare_vectors
from harness_ext.leaderboard.contracts import Board
from harness_ext.leaderboard.site import write_site
from harness_ext.loss_groups import Z, loss_groups

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install -e '.[dev]'")

from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.remote.webelement import WebElement  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="no chromium or no chromedriver: on Debian, apt-get install chromium chromium-driver",
)

ROWS = "[...document.querySelectorAll('.grid-body .grid-row:not([hidden])')]"
LABELS = "[...document.querySelectorAll('.grid-head .grid-label')].map((node) => node.textContent)"

WAIT = 20.0
"""Seconds; nothing is timed, this is when a test gives up."""


class Site:
    """A browser on one site."""

    def __init__(self, driver: Any, folder: Path) -> None:
        self.driver = driver
        self.folder = folder

    def open(self, address: str = "#/") -> None:
        """Load the page afresh, and wait until it is drawn."""
        self.driver.get("about:blank")
        self.driver.get((self.folder / "index.html").as_uri() + address)
        self.until("document.body.dataset.ready")
        self.settle()

    def go(self, address: str) -> None:
        """Another page of the site that is open, as a link would."""
        if self.run("return location.hash") == address:
            return
        self.run("delete document.body.dataset.ready; location.hash = arguments[0]", address)
        self.until("document.body.dataset.ready")
        self.settle()

    def until(self, expression: str) -> Any:
        return WebDriverWait(self.driver, WAIT, 0.02).until(
            lambda driver: driver.execute_script(f"return {expression}"), expression
        )

    def settle(self) -> None:
        """Let frames pass: the table paints in the first, the plot in the next."""
        self.driver.execute_async_script(
            "const done = arguments[0]; let left = 4;"
            "const tick = () => left-- ? requestAnimationFrame(tick) : setTimeout(done); tick()"
        )

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def keys(self, *keys: str) -> None:
        """Press keys one after the other, wherever the focus is; `Keys.SHIFT + Keys.TAB` is one key."""
        for key in keys:
            chain = ActionChains(self.driver)
            for modifier in key[:-1]:
                chain.key_down(modifier)
            chain.send_keys(key[-1])
            for modifier in key[:-1]:
                chain.key_up(modifier)
            chain.perform()
            self.settle()

    def focused(self) -> dict[str, Any]:
        return self.run(
            "const at = document.activeElement; return {tag: at.tagName, role: at.getAttribute('role'), text: at.innerText,"
            "column: at.dataset.column, row: at.closest('[data-row]')?.dataset.row ?? null,"
            "label: at.getAttribute('aria-label')}"
        )

    def column(self, label: str) -> list[str]:
        """Texts of a column, row by row from the top, as far as rows are drawn."""
        return self.run(
            f"const at = {LABELS}.indexOf(arguments[0]); const rows = {ROWS};"
            "rows.sort((a, b) => a.dataset.row - b.dataset.row);"
            "return rows.map((row) => row.children[at].querySelector('.grid-main').textContent)",
            label,
        )

    def header(self, label: str) -> WebElement:
        return self.run(
            f"return document.querySelectorAll('.grid-head .grid-cell')[{LABELS}.indexOf(arguments[0])] ?? null",
            label,
        )

    def summary(self) -> str:
        return self.find("#summary").text

    def choose(self, selector: str, value: str) -> None:
        self.run(
            "const node = document.querySelector(arguments[0]); node.value = arguments[1];"
            "node.dispatchEvent(new Event(node.tagName === 'SELECT' ? 'change' : 'input')); ",
            selector,
            value,
        )
        self.settle()


def start(width: int = 2400, height: int = 1500) -> Any:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    # A container has no user namespaces for the sandbox, and little shared memory.
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--window-size={width},{height}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options, webdriver.ChromeService(DRIVER))


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    driver = start()
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def board() -> Board:
    return synthetic_board()


@pytest.fixture(scope="module")
def folder(board: Board, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A folder whose name has to be escaped in a URL.
    folder = tmp_path_factory.mktemp("the site") / "100% ß"
    write_site(board, folder, downloads={"leaderboard.csv": "CSV"})
    return folder


def check_console_and_network(driver: Any, folder: Path) -> None:
    assert [entry for entry in driver.get_log("browser") if entry["level"] != "DEBUG"] == []
    loaded = driver.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert all(name.startswith(folder.as_uri()) for name in loaded), loaded


@pytest.fixture
def site(driver: Any, folder: Path) -> Iterator[Site]:
    driver.get_log("browser")
    yield Site(driver, folder)
    check_console_and_network(driver, folder)


def numbers(texts: list[str]) -> list[float]:
    return [float(text.replace(",", "").replace("−", "-")) for text in texts if text]


# ------------------------------------------------------------------------------------------------------- the table


def test_opens_from_a_file_and_shows_every_model_that_has_a_full_run(site: Site, board: Board) -> None:
    site.open()
    full = {score.model for score in board.scores} | {loss.model for loss in board.losses if not loss.limit}
    full |= {of.model for of in board.flatness if not of.limit}
    assert site.run("return document.querySelector('[role=grid]').ariaRowCount") == str(len(full) + 1)
    assert site.summary().startswith(f"{len(full)} models")
    assert site.run("return document.title") == "Leaderboard"
    assert "limited runs are hidden" in site.find(".lede").text


def test_a_click_on_a_heading_sorts_and_another_turns_it_round(site: Site) -> None:
    site.open()
    site.header("natural_sst").click()
    site.settle()
    assert site.header("natural_sst").get_attribute("aria-sort") == "descending"
    texts = site.column("natural_sst")
    assert numbers(texts) == sorted(numbers(texts), reverse=True)
    site.header("natural_sst").click()
    site.settle()
    assert site.header("natural_sst").get_attribute("aria-sort") == "ascending"
    texts = site.column("natural_sst")
    assert numbers(texts) == sorted(numbers(texts))


def test_blanks_are_blank_and_last_whichever_way(site: Site) -> None:
    site.open(f"#/?sort={column_id('2')}")
    end = Keys.CONTROL + Keys.END
    for _ in range(2):
        site.header("quad_sst").click()
        site.settle()
        site.find(".grid-head .grid-cell").send_keys(end)
        site.settle()
        texts = site.column("quad_sst")
        assert texts[-1] == ""
        assert all(text == "" for text in texts[len(numbers(texts)) :])


def test_a_score_stands_with_its_interval_and_a_mean_only_where_all_tasks_are_there(site: Site, board: Board) -> None:
    site.open()
    cells = site.run(
        "const text = (node, name) => node.querySelector(name).textContent;"
        f"return {ROWS}.flatMap((row) => [...row.children].map((cell) =>"
        "[text(row, '.grid-main'), cell.dataset.column, text(cell, '.grid-main'), text(cell, '.grid-side')]))"
    )
    labels = site.run(f"return {LABELS}")
    by_name = {model.name: model.id for model in board.models}
    tasks = [column for column in board.columns if column.bounded and column.chance is not None]
    scores = {(score.model, score.column): score for score in board.scores}
    seen = {"score": 0, "mean": 0, "partial": 0}
    for name, at, text, side in cells:
        label = labels[int(at)] if int(at) < len(labels) else ""
        model = by_name.get(name)
        if label == "Mean of shown tasks" and model:
            have = [scores[model, column.id] for column in tasks if (model, column.id) in scores]
            if len(have) < len(tasks):
                assert (text, side) == ("", f"{len(have)} of {len(tasks)} tasks")
                seen["partial"] += 1
            else:
                mean = np.mean(
                    [
                        ((score.metrics[column.metric].value or 0) - (column.chance or 0)) / (1 - (column.chance or 0))
                        for score, column in zip(have, tasks, strict=True)
                    ]
                )
                assert float(text) == pytest.approx(100 * mean, abs=0.06)
                assert side.startswith("[")
                seen["mean"] += 1
        elif label == "natural_sst" and model and text:
            score = scores[model, column_id("0")]
            assert float(text) == pytest.approx(100 * (score.metrics["acc"].value or 0), abs=0.06)
            metric = score.metrics["acc"]
            low, high = statistics.interval(
                metric.value or 0, metric.stderr, score.num_documents, bounded=True, is_share=True
            ) or (
                0,
                0,
            )
            assert side == f"[{100 * low:.1f}, {100 * high:.1f}]"
            seen["score"] += 1
    assert min(seen.values()) > 2, seen


def test_filters_narrow_the_table_and_are_in_the_address(site: Site, board: Board) -> None:
    site.open()
    shown = len(site.column("Model"))
    site.choose("input[type=search]", "SMOLLM float32")
    names = site.column("Model")
    assert names
    assert len(names) < shown
    found = {
        m.name
        for m in board.models
        if all(w in f"{m.name} {m.dtype} {m.family}".lower() for w in ("smollm", "float32"))
    }
    assert set(names) == found
    site.find("summary").click()
    box = next(
        label for label in site.driver.find_elements(By.CSS_SELECTOR, ".menu-panel .check") if label.text == "SmolLM"
    )
    box.click()
    site.choose("input[placeholder=min]", "1000")
    expected = {
        model.name
        for model in board.models
        if model.name in found and model.family == "SmolLM" and (model.num_parameters or 0) >= 1e9
    }
    assert set(site.column("Model")) == expected
    site.until("location.hash.includes('min=1000')")
    address = site.run("return location.hash")
    site.open(address)
    assert set(site.column("Model")) == expected
    assert site.find("input[type=search]").get_attribute("value") == "SMOLLM float32"
    next(
        button for button in site.driver.find_elements(By.CSS_SELECTOR, ".button") if button.text == "Clear filters"
    ).click()
    site.settle()
    assert len(site.column("Model")) == shown


def test_a_task_that_is_asked_for_leaves_the_models_that_have_it(site: Site, board: Board) -> None:
    site.open(f"#/?task={column_id('3')}&columns=name.{column_id('3')}")
    having = {score.model for score in board.scores if score.column == column_id("3")}
    assert site.summary().startswith(f"{len(having)} of ")
    assert all(site.column("kernel_sst"))


def test_columns_are_chosen(site: Site) -> None:
    site.open()
    site.find("#columns-menu summary").click()
    next(
        label for label in site.driver.find_elements(By.CSS_SELECTOR, "#columns-menu .check") if label.text == "Family"
    ).click()
    next(
        button
        for button in site.driver.find_elements(By.CSS_SELECTOR, "#columns-menu button")
        if button.text == "No tasks"
    ).click()
    site.settle()
    labels = site.run(f"return {LABELS}")
    assert labels == [
        "Model",
        "Family",
        "Parameters",
        "Loss group",
        "Rank in group",
        "Loss",
        "Flatness",
        "Mean of shown tasks",
    ]
    site.keys(Keys.ESCAPE)
    assert site.focused()["tag"] == "SUMMARY"
    site.until("location.hash.includes('columns=')")


def test_limited_runs_are_shown_when_asked_and_marked(site: Site, board: Board) -> None:
    limited = next(score for score in board.limited if score.column == column_id("0"))
    name = next(model.name for model in board.models if model.id == limited.model)
    site.open()
    site.choose("input[type=search]", name)
    before = site.run("return document.querySelectorAll('.grid-body .grid-row:not([hidden]) .mark-sign').length")
    site.find(".check.boxed input").click()
    site.settle()
    row = site.run(
        f"return {ROWS}.map((row) => [row.querySelector('.grid-main').textContent, row.innerText,"
        "[...row.querySelectorAll('.mark-sign')].map((mark) => mark.title)]).find(([name]) => name === arguments[0])",
        name,
    )
    assert before == 0 or row[2]
    assert f"limited run: {limited.limit}" in row[2]
    assert "†" in row[1]


def test_two_runs_that_differ_are_flagged_and_both_shown(site: Site, board: Board) -> None:
    score = next(score for score in board.scores if score.conflict)
    site.open(f"#/?columns=name.{score.column}&search={score.model}")
    site.choose("input[type=search]", "")
    titles = site.run("return [...document.querySelectorAll('.mark-sign')].map((mark) => mark.title)")
    assert "runs of this configuration found different numbers" in titles
    site.open(f"#/model/{score.model}")
    rows = site.run("return [...document.querySelectorAll('.notice table tbody tr')].map((row) => row.innerText)")
    assert len(rows) >= 2
    assert all(any(run.source in row for row in rows) for run in score.runs)


# ------------------------------------------------------------------------------------------------------ loss groups


def python_groups(board: Board, tolerance: float) -> list[list[str]]:
    losses = [loss for loss in board.losses if loss.limit is None]
    found = loss_groups(
        [loss.bits_per_byte.value or 0.0 for loss in losses],
        [loss.bits_per_byte.stderr or 0.0 for loss in losses],
        tolerance=tolerance,
    )
    return [[losses[member].model for member in group.members] for group in found.groups]


@pytest.mark.parametrize("tolerance", [0.004, 0.01, 0.03, 0.1])
def test_the_groups_of_a_tolerance_are_those_of_the_package(site: Site, board: Board, tolerance: float) -> None:
    site.open(f"#/?tolerance={tolerance}&columns=name.group&sort=group")
    names = {model.id: model.name for model in board.models}
    expected = {
        names[model]: str(at + 1) for at, group in enumerate(python_groups(board, tolerance)) for model in group
    }
    found = dict(zip(site.column("Model"), site.column("Loss group"), strict=True))
    assert {name: group for name, group in found.items() if group} == expected


def test_the_tolerance_slider_moves_by_keys_and_the_groups_with_it(site: Site, board: Board) -> None:
    site.open()
    slider = site.find("#tolerance")
    before = float(slider.get_attribute("value"))
    slider.send_keys(Keys.END)
    site.settle()
    assert float(slider.get_attribute("value")) == float(slider.get_attribute("max")) > before
    assert "bits per byte" in (slider.get_attribute("aria-valuetext") or "")
    groups = python_groups(board, float(slider.get_attribute("value")))
    assert f"{len(groups)} loss group" in site.summary()
    slider.send_keys(Keys.HOME)
    site.settle()
    assert "0 loss groups" in site.summary()
    site.until("location.hash.includes('tolerance=0')")


def test_ranks_are_those_that_intervals_leave_open(site: Site) -> None:
    rng = np.random.default_rng(5)
    for _ in range(20):
        centres, halves = rng.normal(size=12).round(1), rng.uniform(0, 1, size=12).round(1)
        intervals = [{"low": c - h, "high": c + h} for c, h in zip(centres.tolist(), halves.tolist(), strict=True)]
        expected = [
            [1 + sum(o["low"] > i["high"] for o in intervals), 12 - sum(o["high"] < i["low"] for o in intervals)]
            for i in intervals
        ]
        if site.run("return location.protocol") != "file:":
            site.open()
        assert site.run("return rankRanges(arguments[0])", intervals) == expected


def test_groups_in_javascript_are_those_in_python(site: Site) -> None:
    """Random losses, with ties, all sizes of errors, and tolerances from none to all."""
    rng = np.random.default_rng(0)
    site.open("#/about")
    cases = []
    for _ in range(150):
        count = int(rng.integers(0, 40))
        losses = rng.normal(0, 0.05, count)
        if rng.random() < 0.3:
            losses = losses.round(2)
        stderrs = rng.exponential(0.005, count) * (rng.random(count) < 0.8)
        cases.append(
            {
                "losses": losses.tolist(),
                "stderrs": stderrs.tolist(),
                "tolerance": float(10 ** rng.uniform(-3, 0)),
                "z": float(rng.choice([0.0, Z])),
                "minSize": int(rng.integers(2, 5)),
            }
        )
    found = site.run(
        "return arguments[0].map(({losses, stderrs, ...options}) => lossGroups(losses, stderrs, options))", cases
    )
    some = 0
    for case, groups in zip(cases, found, strict=True):
        expected = loss_groups(
            case["losses"], case["stderrs"], tolerance=case["tolerance"], z=case["z"], min_size=case["minSize"]
        ).groups
        assert [tuple(group["members"]) for group in groups] == [group.members for group in expected]
        assert [group["bound"] for group in groups] == pytest.approx([group.bound for group in expected], rel=1e-12)
        some += len(expected)
    assert some > 200


# ------------------------------------------------------------------------------------------------------- statistics


def test_exact_mcnemar_is_that_of_the_package(site: Site) -> None:
    site.open("#/about")
    assert site.run("return mcnemar(25, 8)") == pytest.approx(0.00455, abs=5e-6)
    pairs = [(0, 0), (0, 1), (5, 0), (3, 3), (8, 25), (400, 500), (900, 1000), (3000, 2500)]
    found = site.run("return arguments[0].map(([b, c]) => mcnemar(b, c))", pairs)
    # Sums of logarithms of up to 5,500 factors in double precision.
    assert found == pytest.approx([statistics.mcnemar_exact(b, c) for b, c in pairs], rel=1e-9)


def test_intervals_are_those_of_the_package(site: Site) -> None:
    site.open("#/about")
    cases = [(0.5, 0.03, 200, True, True), (0.99, 0.02, 50, True, True), (1.0, 0.0, 50, True, True),
             (0.0, None, 30, True, True), (0.4, None, None, True, True), (1.3, 0.1, 10, True, True),
             (1.3, None, 10, True, True), (0.4, None, 30, True, False), (0.99, 0.02, 30, True, False),
             (12.5, 0.4, 10, False, False), (12.5, None, 10, False, False), (0.3, None, 872, True, True)]  # fmt: skip
    found = site.run(
        "return arguments[0].map(([value, stderr, ...rest]) => scoreInterval(value, stderr ?? NaN, ...rest))",
        cases,
    )
    for case, interval in zip(cases, found, strict=True):
        expected = statistics.interval(*case[:3], bounded=case[3], is_share=case[4])
        assert interval == (None if expected is None else pytest.approx(list(expected), abs=1e-12))


def test_aggregates_are_those_of_the_package(site: Site) -> None:
    rng = np.random.default_rng(1)
    scores = rng.integers(0, 6, (9, 5)) / 6
    better = [True, True, False, True, False]
    partial = scores.copy()
    partial[[2, 7], [0, 4]] = np.nan
    complete = ~np.isnan(partial).any(axis=1)
    site.open("#/about")
    found = site.run(
        "const [table, better] = arguments; const tasks = better.map((one, at) => ({better: one, chance: 0.25,"
        "dataset: at < 2 ? 'd' : `d${at}`,"
        "value: (place) => table[place][at] ?? NaN, stderr: () => 0.1}));"
        "return [...aggregates(tasks, table.map((_, at) => at)).values()]",
        json.loads(json.dumps(np.where(np.isnan(partial), None, partial).tolist())),
        better,
    )
    assert [row["k"] for row in found] == (~np.isnan(partial)).sum(axis=1).tolist()
    assert [row["mean"] is not None for row in found] == complete.tolist()
    rows = [row for row in found if row["mean"] is not None]
    assert [row["borda"] for row in rows] == pytest.approx(statistics.borda(partial[complete], better).tolist())
    assert [row["wins"] for row in rows] == pytest.approx(statistics.win_rates(partial[complete], better).tolist())
    assert [row["mean"] for row in rows] == pytest.approx(((partial[complete] - 0.25) / 0.75).mean(axis=1).tolist())
    assert [row["stderr"] for row in rows] == pytest.approx([0.1 / 0.75 * (2**2 + 3) ** 0.5 / 5] * len(rows))


def test_the_paired_bootstrap_is_that_of_the_package_up_to_its_draws(site: Site) -> None:
    """220 documents, 25 against 8 discordant. The ends of both are within 0.15 standard errors of the exact ones (4 standard
    errors of a 2.5 % quantile of 2,000 draws are 0.24): seeds are fixed, so this either holds or does not.
    """
    first = np.r_[np.ones(25), np.zeros(8), np.ones(187)]
    second = np.r_[np.zeros(25), np.ones(8), np.ones(187)]
    expected = statistics.paired_bootstrap(second, first, rng=np.random.default_rng(0))
    site.open("#/about")
    low, high = site.driver.execute_async_script(
        "const done = arguments[1]; pairedBootstrap(Float64Array.from(arguments[0]), {seed: 7}).then(done)",
        (first - second).tolist(),
    )
    stderr = float(np.std(first - second) / np.sqrt(220))
    assert [low, high] == pytest.approx([expected.low, expected.high], abs=0.3 * stderr)


# -------------------------------------------------------------------------------------------------- keyboard alone


def test_by_keyboard_alone_sort_open_a_model_and_compare_two(site: Site) -> None:
    site.open()
    site.run("document.body.focus()")
    site.keys(Keys.TAB)
    assert site.focused()["text"] == "Skip to content"
    for _ in range(60):
        site.keys(Keys.TAB)
        if site.focused()["role"] in {"columnheader", "gridcell", "rowheader"}:
            break
    assert site.focused() | {"text": None, "label": None} == {
        "tag": "DIV", "role": "columnheader", "text": None, "column": "0", "row": None, "label": None,
    }  # fmt: skip
    site.keys(*[Keys.ARROW_RIGHT] * 7)
    assert site.focused()["text"].startswith("natural_sst")
    site.keys(Keys.ENTER)
    assert site.focused()["text"].startswith("natural_sst")
    assert site.header("natural_sst").get_attribute("aria-sort") == "descending"
    site.keys(Keys.ARROW_DOWN, Keys.HOME)
    assert (site.focused()["row"], site.focused()["role"]) == ("0", "rowheader")
    site.keys(Keys.SPACE, Keys.ARROW_DOWN, Keys.SPACE)
    assert site.run("return document.querySelectorAll('[aria-selected=true]').length") == 2
    assert "2 models picked" in site.find(".pick-bar").text
    # Back from the table to the link that has appeared before it.
    for _ in range(4):
        site.keys(Keys.SHIFT + Keys.TAB)
        if site.focused()["text"] == "Compare the two":
            break
    site.keys(Keys.ENTER)
    site.until("document.body.dataset.ready === 'compare'")
    site.until("document.querySelector('.page').dataset.compared")
    assert "not compared by document" in site.find("main").text
    site.driver.back()
    site.until("document.body.dataset.ready === 'overview'")
    site.settle()
    site.run('document.querySelector(\'.grid-body [tabindex="0"], .grid-head [tabindex="0"]\').focus()')
    site.keys(Keys.ARROW_DOWN, Keys.HOME, Keys.CONTROL + Keys.END)
    assert int(site.focused()["row"]) + 2 == int(site.run("return document.querySelector('[role=grid]').ariaRowCount"))
    site.keys(Keys.HOME)
    name = site.focused()["text"].split("\n")[0]
    site.keys(Keys.ENTER)
    site.until("document.body.dataset.ready === 'model'")
    assert site.find("h1").text == name
    assert site.run("return document.activeElement.tagName") == "H1"


def test_shift_and_enter_add_a_second_sort(site: Site) -> None:
    site.open()
    site.header("Parameters").click()
    site.run("arguments[0].focus()", site.header("Loss"))
    site.keys(Keys.SHIFT + Keys.ENTER)
    sorts = [site.header(label).get_attribute("aria-sort") for label in ("Parameters", "Loss", "Flatness")]
    assert sorts == ["descending", "ascending", "none"]


def test_a_cell_far_to_the_right_is_reached_and_not_covered(site: Site) -> None:
    site.open()
    site.run("document.querySelector('.grid-head [tabindex=\"0\"]').focus()")
    site.keys(Keys.ARROW_DOWN, Keys.END)
    focused = site.focused()
    assert int(focused["column"]) + 1 == int(site.run("return document.querySelector('[role=grid]').ariaColCount"))
    cell, host, first = site.run(
        "return [document.activeElement, ...['.grid-scroll', '.grid-cell'].map((name) => document.querySelector(name))]"
        ".map((node) => { const {left, right} = node.getBoundingClientRect(); return {left, right}; })"
    )
    assert cell["right"] <= host["right"] + 1
    site.keys(*[Keys.ARROW_LEFT] * 8)
    cell = site.run("const {left, right} = document.activeElement.getBoundingClientRect(); return {left, right}")
    assert cell["left"] >= first["right"] - 1


# ---------------------------------------------------------------------------------------------------------- scatter


def test_brushing_the_scatter_selects_rows_of_the_table(site: Site, board: Board) -> None:
    site.open(f"#/?downstream={column_id('0')}")
    whole = len(site.column("Model"))
    overlay = site.find(".brush .overlay")
    box = overlay.rect
    chain = ActionChains(site.driver).move_to_element_with_offset(
        overlay, -int(box["width"] / 2) + 2, -int(box["height"] / 2) + 2
    )
    chain.click_and_hold().move_by_offset(int(box["width"] * 0.4), int(box["height"]) - 6).release().perform()
    site.settle()
    values = {
        label: site.find(f"input[aria-label='{label}']").get_attribute("value")
        for label in ("Loss from", "Loss to", "Score from", "Score to")
    }
    low, high, bottom, top = (float(values[label] or "nan") for label in values)
    rows = len(site.column("Model"))
    assert 0 < rows < whole
    losses = {loss.model: loss.bits_per_byte.value or 0.0 for loss in board.losses if not loss.limit}
    scores = {
        score.model: 100 * (score.metrics["acc"].value or 0.0)
        for score in board.scores
        if score.column == column_id("0")
    }
    # The inputs have four digits.
    inside = {
        m
        for m in losses.keys() & scores.keys()
        if low <= losses[m] <= high and bottom - 0.05 <= scores[m] <= top + 0.05
    }
    assert rows == len(inside)
    site.until("location.hash.includes('brush=')")
    address = site.run("return location.hash")
    site.open(address)
    assert len(site.column("Model")) == rows
    assert float(site.run("return document.querySelector('.brush .selection').getAttribute('width')")) > 50


def test_a_click_on_a_point_opens_its_model(site: Site, board: Board) -> None:
    site.open(f"#/?downstream={column_id('0')}")
    point = site.find(".figure [aria-label=dot] circle")
    ActionChains(site.driver).move_to_element(point).perform()
    site.settle()
    assert "flatness" in site.find(".chart [aria-label=tip]").text
    ActionChains(site.driver).click().perform()
    site.until("document.body.dataset.ready === 'model'")
    assert site.find("h1").text in {model.name for model in board.models}


def test_a_range_that_is_typed_selects_rows_too(site: Site, board: Board) -> None:
    site.open(f"#/?downstream={column_id('0')}")
    field = site.find("input[aria-label='Loss to']")
    field.send_keys("0.95", Keys.TAB)
    site.settle()
    losses = numbers(site.column("Loss"))
    assert losses
    assert max(losses) <= 0.95
    scores = {score.model for score in board.scores if score.column == column_id("0")}
    assert len(losses) == sum(
        (loss.bits_per_byte.value or 9) <= 0.95 and not loss.limit and loss.model in scores for loss in board.losses
    )
    next(
        button for button in site.driver.find_elements(By.CSS_SELECTOR, ".button") if button.text == "Clear selection"
    ).click()
    site.settle()
    assert len(site.column("Model")) > len(losses)


# ------------------------------------------------------------------------------------------------------- other pages


def test_a_model_page_has_everything_that_its_file_has(site: Site, board: Board) -> None:
    model = board.models[7]
    assert model.lab
    site.open(f"#/model/{model.id}")
    text = site.run("return document.querySelector('main').textContent")
    headings = [node.text for node in site.driver.find_elements(By.CSS_SELECTOR, "h2")]
    assert headings == [
        "Pretraining loss",
        "Tasks",
        "Spread over prompts",
        "Layers",
        "Flatness",
        "Training in the lab",
        "Provenance",
    ]
    scores = [score for score in board.scores if score.model == model.id]
    assert scores
    for score in scores:
        column = next(column for column in board.columns if column.id == score.column)
        assert column.label in text
        for run in score.runs:
            assert run.source in text
            assert run.command in text
    assert "lm_eval 0.4.13" in text
    assert str(model.dtype) in text
    assert (model.sha or "") in text
    assert site.run("return document.querySelectorAll('figure svg').length") >= 4
    assert site.run("return document.querySelectorAll('figure [aria-label=cell] rect').length") == 97


def test_a_task_page_shows_prompts_words_and_what_each_prompt_gave(site: Site, board: Board) -> None:
    column = board.columns[0]
    site.open(f"#/task/{column.id}")
    shown = site.run("return [...document.querySelectorAll('pre.code')].map((node) => node.textContent)")
    assert shown == [prompt.template for prompt in column.prompts]
    words = site.run("return [...document.querySelectorAll('.tag.word')].map((node) => node.textContent)")
    assert words == ["terrible", "bad", "great", "good"] * 3
    assert "What each prompt gave" in site.find("main").text
    site.choose("#metric", "f1")
    assert "f1, %" in site.find("main").text


def test_a_comparison_agrees_with_the_package_and_refuses_other_documents(site: Site, board: Board) -> None:
    first, second = board.models[2], board.models[6]
    assert first.name != second.name
    site.open(f"#/compare/{first.id}/{board.models[3].id}")
    site.until("document.querySelector('.page').dataset.compared")
    rows = site.run(
        "return [...document.querySelectorAll('main table tbody tr')]"
        ".map((row) => [...row.cells].map((cell) => cell.innerText))"
    )
    column = board.columns[0]
    vectors = {vector.model: vector for vector in board.vectors[column.id]}
    pair = list(zip(vectors[first.id].codes, vectors[board.models[3].id].codes, strict=True))
    alone = pair.count(("1", "0")), pair.count(("0", "1"))
    row = next(row for row in rows if row[0] == column.label)
    assert row[5:8] == [str(alone[0]), str(alone[1]), str(len(pair))]
    assert float(row[2]) == pytest.approx(statistics.mcnemar_exact(*alone), abs=5e-5)
    assert float(row[1].split()[0].replace("−", "-")) == pytest.approx(
        100 * (alone[0] - alone[1]) / len(pair), abs=0.051
    )

    # In words: who is better where the interval is on one side of 0.
    ends = [
        [float(end) for end in row[1].replace("−", "-").split("[")[1].rstrip("]").split(",")]
        for row in rows
        if len(row) == 9 and "[" in row[1]
    ]
    of_a, of_b = sum(low > 0 for low, _ in ends), sum(high < 0 for _, high in ends)
    assert site.find(".verdicts").text == (
        f"Of {len(ends)} tasks compared by document, A is better on {of_a}, B on {of_b}, and on {len(ends) - of_a - of_b} no "
        "difference is shown: the interval has 0 in it."
    )

    site.open(f"#/compare/{first.id}/{second.id}")
    site.until("document.querySelector('.page').dataset.compared")
    assert "the documents differ: 0 of 220 and 220 are shared" in site.find("main").text.lower()


def test_documents_on_which_two_models_disagree(site: Site, board: Board) -> None:
    first, second = board.models[2], board.models[3]
    site.open(f"#/compare/{first.id}/{second.id}")
    site.until("document.querySelector('.page').dataset.compared")
    site.find("main table tbody button").click()
    site.until("document.querySelector('.documents li')")
    vectors = {vector.model: vector.codes for vector in board.vectors[board.columns[0].id]}
    keys = board.document_sets[board.columns[0].id][0]
    known = {document.key: document.text for document in board.documents[board.columns[0].id]}
    differing = [
        known[key]
        for key, a, b in zip(keys, vectors[first.id], vectors[second.id], strict=True)
        if a != b and key in known
    ]
    shown = site.run("return [...document.querySelectorAll('.document')].map((node) => node.textContent)")
    assert shown == differing[: len(shown)]
    assert len(shown) == min(25, len(differing))


def test_two_committed_models_of_equal_loss_differ_on_documents_that_are_shown(driver: Any, tmp_path: Path) -> None:
    committed = Path(__file__).resolve().parents[2] / "leaderboard" / "results" / "lab_cpu"
    for name in ("adamw-w64-d4-00004100", "adversarial-w64-00004800"):
        shutil.copytree(committed / name, tmp_path / "results" / name)
    board = build_board(tmp_path / "results", Cache(None, ""))
    write_site(board, tmp_path / "site", downloads={})
    first, second = sorted(board.models, key=lambda model: model.name)
    (column,) = (column for column in board.columns if column.id in board.vectors)
    vectors = {vector.model: vector for vector in board.vectors[column.id]}
    expected = compare_vectors(
        vectors[first.id], vectors[second.id], board.document_sets[column.id], rng=np.random.default_rng(0)
    )
    assert expected.p_value is not None
    assert expected.p_value < 1e-9

    driver.get_log("browser")
    site = Site(driver, tmp_path / "site")
    site.open(f"#/compare/{first.id}/{second.id}")
    site.until("document.querySelector('.documents li')")
    said = site.find(".verdicts").text
    assert said.startswith(f"{column.task}: A is better by {-100 * expected.difference.value:.1f} points;")
    assert said.endswith(f"Of 2,000 documents A alone has {expected.first_only} right, B alone {expected.second_only}.")
    text = site.find("main").text
    assert "No difference in loss is shown." in text
    assert "19 tasks not compared by document" in text
    assert len(board.documents[column.id]) > 100
    site.choose("#side", "b")
    verdicts = site.run("return [...document.querySelectorAll('.documents li')].map((node) => node.innerText)")
    assert len(verdicts) == 25
    assert all(re.fullmatch(r"(w\d+ ?)+\s+target [0-3]\s+A wrong\s+B right", shown.strip()) for shown in verdicts)
    check_console_and_network(driver, tmp_path / "site")


def test_findings_and_tasks_and_about(site: Site, board: Board) -> None:
    site.open("#/findings")
    assert "−0.80 [−0.95, −0.60], p < 0.001" in site.find("main").text
    assert "3 models" in site.find("main").text
    site.open("#/tasks")
    assert len(site.driver.find_elements(By.CSS_SELECTOR, "tbody tr")) == len(board.columns)
    site.open("#/about")
    assert HOSTILE_TEXT.replace("\u2028", "") in site.find("main").get_property("textContent").replace("\u2028", "")


@pytest.mark.parametrize(
    "address", ["#/model/m000000000000", "#/model/../../x", "#/task/%3Cb%3E", "#/nothing", "#/model", "#%E0%A4%A"]
)
def test_an_address_that_leads_nowhere_says_so(site: Site, address: str) -> None:
    site.open(address)
    assert site.find("h1").text in {"No such model", "No such task", "Models of equal pretraining loss, compared"}


# -------------------------------------------------------------------------------------------------------- untrusted


def test_hostile_names_are_text_on_every_page(site: Site, board: Board) -> None:
    hostile = [model for model in board.models if model.name in HOSTILE_NAMES]
    pages = [
        "#/",
        "#/tasks",
        f"#/task/{board.columns[0].id}",
        f"#/task/{board.columns[1].id}",
        "#/compare",
        "#/findings",
        "#/about",
    ]
    pages += [f"#/model/{model.id}" for model in hostile] + [f"#/compare/{hostile[0].id}/{hostile[1].id}"]
    site.open()
    names = {model.id: model.name for model in hostile}
    for page in pages:
        site.go(page)
        assert not site.run(
            "return document.querySelectorAll('main script, main img, main b:empty, main svg svg, iframe, object,"
            "[onload], [onerror]').length"
        )
        assert site.run("return [...document.querySelectorAll('a')].every((a) => a.protocol === 'file:')")
        title, heading = site.run("return [document.title, document.querySelector('h1').textContent]")
        if page.startswith("#/model/"):
            assert heading == names[page.removeprefix("#/model/")]
            # A title is set with its white space collapsed.
            assert title.split() == f"{heading} · Leaderboard".split()
        else:
            assert "pwned" not in title
    site.go("#/?limited=1")
    assert set(names.values()) <= set(site.column("Model"))


def test_an_inline_script_does_not_run_and_text_cannot_become_markup(driver: Any, folder: Path) -> None:
    site = Site(driver, folder)
    site.open("#/about")
    ran = site.run(
        "const script = document.createElement('script'); script.append('window.inlineRan = true');"
        "document.body.append(script);"
        "let markup = false; try { document.createElement('div').innerHTML = '<b>x</b>'; markup = true; } catch {}"
        "return [Boolean(window.inlineRan), markup]"
    )
    assert ran == [False, False]
    assert len(driver.get_log("browser")) >= 2  # each refusal is reported


def test_an_empty_board_says_how_to_add_a_result(driver: Any, tmp_path: Path) -> None:
    write_site(Board((), (), ()), tmp_path)
    site = Site(driver, tmp_path)
    for address in ("#/", "#/tasks", "#/findings", "#/compare"):
        site.open(address)
        assert site.find("h1").text == "No results yet"
        assert "harness-ext leaderboard add" in site.find("main").text
    check_console_and_network(driver, tmp_path)


def test_a_board_without_losses_or_flatness_is_a_plain_table(driver: Any, tmp_path: Path, board: Board) -> None:
    write_site(dataclasses.replace(board, losses=(), flatness=(), groups=(), correlations=()), tmp_path)
    site = Site(driver, tmp_path)
    site.open()
    assert numbers(site.column("natural_sst"))
    assert site.header("Loss") is None
    assert "No model has a loss yet" in site.find("main").text
    for address in (f"#/model/{model_id(0)}", f"#/compare/{model_id(2)}/{model_id(3)}", "#/findings"):
        site.open(address)
    check_console_and_network(driver, tmp_path)


def test_data_of_another_schema_or_a_missing_file_is_refused_by_name(driver: Any, tmp_path: Path, board: Board) -> None:
    write_site(board, tmp_path)
    gone = tmp_path / "data" / "models" / f"{model_id(1)}.js"
    gone.unlink()
    site = Site(driver, tmp_path)
    site.open(f"#/model/{model_id(1)}")
    assert gone.name in site.find("[role=alert]").text
    index = tmp_path / "data" / "index.js"
    index.write_text(index.read_text().replace('"schema_version":1', '"schema_version":99'))
    driver.get("about:blank")
    driver.get((tmp_path / "index.html").as_uri())
    site.until("document.querySelector('[role=alert]')")
    assert "schema version 99" in site.find("[role=alert]").text
    driver.get_log("browser")


# ----------------------------------------------------------------------------------------------------- accessibility


PAGES: dict[str, Callable[[], str]] = {
    "overview": lambda: "#/",
    "model": lambda: f"#/model/{model_id(1)}",
    "task": lambda: f"#/task/{column_id('0')}",
    "tasks": lambda: "#/tasks",
    "compare": lambda: f"#/compare/{model_id(2)}/{model_id(3)}",
    "findings": lambda: "#/findings",
    "about": lambda: "#/about",
}


def test_every_control_has_a_name_and_headings_have_an_order(site: Site) -> None:
    site.open()
    for name, address in PAGES.items():
        site.go(address())
        nameless = site.run(
            "return [...document.querySelectorAll('input, select, button, a, summary, [role=img], [role=grid], [role=region]')]"
            ".filter((node) => !(node.getAttribute('aria-label') || node.labels?.length || node.textContent.trim()))"
            ".map((node) => node.outerHTML)"
        )
        assert nameless == [], name
        # A plot is one image with a description; its parts, which Plot names by kind, are not read.
        assert site.run("return [...document.querySelectorAll('svg.chart')].every((of) => of.ariaHidden === 'true')"), (
            name
        )
        levels = site.run("return [...document.querySelectorAll('h1, h2, h3')].map((node) => Number(node.tagName[1]))")
        assert levels[0] == 1, name
        assert levels.count(1) == 1, name
        assert all(after - before <= 1 for before, after in itertools.pairwise(levels)), name
        identifiers = site.run("return [...document.querySelectorAll('[id]')].map(({id}) => id)")
        assert len(set(identifiers)) == len(identifiers), name


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_has_contrast(site: Site, dark: bool) -> None:
    """WCAG AA: 4.5 for text, 3 for marks of plots."""
    features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    site.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    try:
        site.open()
        colours = site.run(
            "const style = getComputedStyle(document.documentElement);"
            "const context = document.createElement('canvas').getContext('2d', {willReadFrequently: true});"
            "return Object.fromEntries(arguments[0].map((name) => { context.fillStyle = style.getPropertyValue('--' + name);"
            "context.fillRect(0, 0, 1, 1); return [name, [...context.getImageData(0, 0, 1, 1).data].slice(0, 3)]; }))",
            [
                "page",
                "sunken",
                "tint",
                "accent-soft",
                "text",
                "muted",
                "accent",
                "warn",
                "warn-soft",
                "natural",
                "probe",
                "quad",
                "kernel",
            ],
        )
    finally:
        site.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})

    def luminance(colour: list[int]) -> float:
        linear = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (value / 255 for value in colour)
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(first: str, second: str) -> float:
        low, high = sorted((luminance(colours[first]), luminance(colours[second])))
        return (high + 0.05) / (low + 0.05)

    assert (luminance(colours["page"]) < 0.1) == dark
    for ground in ("page", "sunken", "tint", "accent-soft"):
        for text in ("text", "muted", "accent", "warn"):
            assert contrast(ground, text) >= 4.5, (ground, text)
    assert contrast("warn-soft", "warn") >= 4.5
    for mark in ("natural", "probe", "quad", "kernel"):
        assert contrast("page", mark) >= 2.9, mark


def test_nothing_is_wider_than_a_phone(site: Site) -> None:
    phone = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    site.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        site.open()
        for menu in ("#columns-menu", ".controls .menu"):
            site.find(f"{menu} summary").click()
            left, right = site.run(
                "const {left, right} = document.querySelector(arguments[0]).getBoundingClientRect(); return [left, right]",
                f"{menu} .menu-panel",
            )
            assert 0 <= left < right <= 360
            site.keys(Keys.ESCAPE)
        for name, address in PAGES.items():
            site.go(address())
            assert site.run("return document.documentElement.scrollWidth") <= 360, name
    finally:
        site.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
