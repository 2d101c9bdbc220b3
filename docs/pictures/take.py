"""Take the screenshots of README and docs again, from the results of `make demo` in runs/demo.

    .venv/bin/python docs/pictures/take.py

Needs Chromium. Pages are shown as in a browser, other jobs by their output.
"""

import html
import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
DEMO = Path("runs/demo").resolve()
CONFIG = "configs/demo.yaml"
COLOURS = 160  # enough for flat colours and grey digits, at a third of the size
TERMINAL = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; background: #faf8f3; display: inline-block; }}
pre {{ margin: 0; padding: 22px 26px; font: 13px/1.45 "DejaVu Sans Mono", monospace; color: #24211c; }}
b {{ color: #c2470f; }}
</style><pre><b>$ {command}</b>
{output}</pre>"""
NIGHTS = """run: {name: nightly, storage: runs/nights, seed: 1}
data:
  shards: "SHARDS"
  test: runs/demo/shards/test-*.tar
  classes: runs/demo/shards/classes.txt
images: {crop: 8, pad: 1, flip: false}
model: {backbone: small_convnet}
optimizer: {tuned_batch: 64, batch_per_worker: 64}
stages:
  backbone: {epochs: 0, rate: 0.05}
  pencil: {epochs: 14, rate: 0.05, alpha: 0.1, beta: 0.4, lambda: 400, tuned_classes: 10}
  finetune: {epochs: 4, rate: 0.05, drop_after: [2]}
workers: {count: 1, in_process: true}
nightly: {first_epochs: [10, 20, 10], max_changed_share: 0.2, max_repair_jump: 0.4}
"""
QUERY = (
    "select sample_id, given_class, predicted_class, label_score, is_label_issue "
    "from 'runs/demo/export/table/*.parquet' order by label_score limit 5"
)


def main() -> None:
    """Take all pictures."""
    with sync_playwright() as driver:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        # Pages have a content policy with hashes of their scripts, and `show` changes their text.
        page = browser.new_page(viewport={"width": 1240, "height": 860}, bypass_csp=True)
        show(page, DEMO / "report.html")
        page.wait_for_selector("html[data-ready]")
        keep(page, "review.png")
        for key in "aaaj":
            page.keyboard.press(key)
        keep(page, "review-samples.png")
        show(page, DEMO / "catalogue" / "summary.html")
        keep(page, "catalogue.png")
        jobs = {
            "balance_subset": ["pipelines.balance_subset", CONFIG, "subset.total=500"],
            "why": ["pipelines.why", CONFIG, "digit-0555"],
        }
        for name, words in jobs.items():
            draw(page, name, f"python -m {' '.join(words)}", run("-m", *words))
        draw(page, "reclean_nightly", "python -m pipelines.reclean_nightly runs/nights.yaml", night())
        table = run("-c", f'import duckdb; duckdb.sql("{QUERY}").show(max_width=110)')
        draw(page, "export-duckdb", f'duckdb -c "{QUERY}"', table)
        browser.close()


def show(page: Any, path: Path) -> None:
    """Open a copy of a page without the path of this checkout."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, path.name)
        copy.write_text(
            path.read_text(encoding="utf-8").replace(f"{DEMO.parent.parent}/", ""), encoding="utf-8"
        )
        page.goto(copy.as_uri())
        page.wait_for_load_state("load")


def night() -> str:
    """Run two nights, the second with two more shards of the demo, and return the end of its output."""
    shutil.rmtree("runs/nights", ignore_errors=True)
    for shards in ("train-00000[0-5].tar", "train-*.tar"):
        Path("runs/nights.yaml").write_text(NIGHTS.replace("SHARDS", f"runs/demo/shards/{shards}"))
        printed = run("-m", "pipelines.reclean_nightly", "runs/nights.yaml").splitlines()
    first = max(number for number, line in enumerate(printed) if "night-0002: " in line)
    return "\n".join(["...", *printed[first:]])


def run(*words: str) -> str:
    """Run a command as a user would, and return its output."""
    settled = {**os.environ, "COLUMNS": "110"}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=settled, check=True)
    return "\n".join(_without_folder(line) for line in done.stdout.splitlines())


def _without_folder(line: str) -> str:
    """Remove the path of this checkout; pad table rows so that their frames stay aligned."""
    shorter = line.replace(f"{DEMO.parent.parent}/", "")
    if line.endswith("│"):
        return shorter[:-1] + " " * (len(line) - len(shorter)) + "│"
    return shorter


def draw(page: Any, name: str, command: str, output: str) -> None:
    """Take a picture of a command and its output."""
    page.set_content(TERMINAL.format(command=html.escape(command), output=html.escape(output.rstrip())))
    keep(page.locator("body"), f"{name}.png")


def keep(shown: Any, name: str) -> None:
    """Save a picture with few colours, which are enough for flat pages."""
    picture = Image.open(io.BytesIO(shown.screenshot())).convert("RGB")
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(HERE / name, optimize=True)
    print(f"{name}: {(HERE / name).stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
