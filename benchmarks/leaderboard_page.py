"""Times the leaderboard's table in a browser: until it can be used, and sorting, filtering, scrolling and the tolerance slider.

    python benchmarks/leaderboard_page.py [--models 1000] [--tasks 60] [--repeats 5]

Needs selenium, chromium and chromedriver. A frozen frame is the longest time between two frames while something is done and in
the 700 ms after it; times are of the wall, so nothing else should run.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from selenium import webdriver

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from boards import synthetic_board

from harness_ext.leaderboard.site import write_site

ACT = """
const done = arguments[arguments.length - 1];
const act = () => { %s };
let last = performance.now(), longest = 0, shown = 0, frames = 0;
const start = last;
act();
const handled = performance.now() - start;
const tick = () => {
  const now = performance.now();
  longest = Math.max(longest, now - last);
  last = now;
  if (++frames === 2) shown = now - start;
  if (now - start < 700) requestAnimationFrame(tick);
  else done({handled, shown, longest});
};
requestAnimationFrame(tick);
"""

HEADER = "document.querySelectorAll('.grid-head .grid-cell')"
SEARCH = (
    "const box = document.querySelector('input[type=search]'); box.value = %s; box.dispatchEvent(new Event('input'))"
)
SLIDER = (
    "const slider = document.getElementById('tolerance'); slider.value = slider.max * %s;"
    "slider.dispatchEvent(new Event('input'))"
)
ACTIONS = {
    "sort by a task": f"{HEADER}[8].click()",
    "sort by name": f"{HEADER}[0].click()",
    "filter by text": SEARCH % "'smol'",
    "clear the filter": SEARCH % "''",
    "wider tolerance": SLIDER % "0.6",
    "narrower tolerance": SLIDER % "0.1",
    "scroll far": "const host = document.querySelector('.grid-scroll'); host.scrollTop = (host.scrollTop + 9000) % 30000",
    "scroll sideways": "const host = document.querySelector('.grid-scroll'); host.scrollLeft = (host.scrollLeft + 1500) % 6000",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--tasks", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    board = synthetic_board(options.models, options.tasks, num_documents=200, vectors=False)
    with tempfile.TemporaryDirectory() as folder:
        written = write_site(board, folder)
        print(f"{options.models} models, {options.tasks} tasks, first load {written.first_load / 1e6:.2f} MB")
        url = (Path(folder) / "index.html").as_uri()
        every = ".".join(
            ["group", "loss", "flatness", "mean", *(column.id for column in board.columns if column.bounded)]
        )
        for label, address in {"as it opens": url, "with all tasks": f"{url}#/?columns={every}"}.items():
            report(label, address, options.repeats)


def report(label: str, address: str, repeats: int) -> None:
    opened, times = [], {name: [] for name in ACTIONS}
    for _ in range(repeats):
        browser = start()
        try:
            browser.get(address)
            browser.execute_async_script("setTimeout(arguments[0], 1500)")
            opened.append(browser.execute_script("return performance.getEntriesByName('interactive')[0].startTime"))
            for name, act in ACTIONS.items():
                times[name].append(browser.execute_async_script(ACT % act))
        finally:
            browser.quit()
    print(f"\n{label}: can be used after {spread(opened)} ms")
    print(f"{'':20} {'handled, ms':>16} {'shown, ms':>16} {'longest frame, ms':>20}")
    for name, of in times.items():
        columns = [spread([time[key] for time in of]) for key in ("handled", "shown", "longest")]
        print(f"{name:20} {columns[0]:>16} {columns[1]:>16} {columns[2]:>20}")


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f}-{max(values):.0f})"


def start() -> Any:
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1400,900"):
        options.add_argument(argument)
    driver = shutil.which("chromedriver")
    if driver is None:
        raise SystemExit("no chromedriver: on Debian, apt-get install chromium chromium-driver")
    return webdriver.Chrome(options, webdriver.ChromeService(driver))


if __name__ == "__main__":
    main()
