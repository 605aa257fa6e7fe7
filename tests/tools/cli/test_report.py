# SPDX-License-Identifier: Apache-2.0
"""`async-pipeline report` writes its page, prints text or JSON, and a browser can draw the page."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest

from recipe.async_pipeline.cli.main import main
from recipe.async_pipeline.console import EXIT_OK, EXIT_USERS
from recipe.async_pipeline.observe.table import map_coverage, percent
from recipe.async_pipeline.tools.report.figures.data import data_of
from recipe.async_pipeline.tools.report.figures.run_reader import read_run
from recipe.async_pipeline.tools.report.page import figures_of
from tests import HANG_S
from tests.observe.run_folder import RecordedTrainer, write_run
from tests.tools.report.pages import check


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Generation on two of eight devices is the bottleneck.
    trainer = RecordedTrainer(
        max_lag=3,
        steps=12,
        groups=8,
        order="finished",
        costs={"update": 0.5},
        devices={"train": 6, "generate": 2},
    )
    return write_run(tmp_path_factory.mktemp("runs") / "run", trainer, strategy="fully_async")


@pytest.mark.slow
def test_one_run_gives_one_page_in_its_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder)]) == EXIT_OK
    text = capsys.readouterr().out
    assert text.splitlines()[-1] == f"wrote {folder / 'report.html'}"
    assert "advice: the trainer waited" in text
    assert re.search(
        r"; overlap efficiency \d+% \(without the first step\); devices idle \d+% \(without", text
    )
    check((folder / "report.html").read_text())
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]


def test_two_runs_are_compared(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "made" / "page.html"
    assert main(["report", str(folder), str(folder), "--out", str(page)]) == EXIT_OK
    check(page.read_text())
    capsys.readouterr()
    assert main(["report", str(folder), str(folder), "--json"]) == EXIT_OK
    found = json.loads(capsys.readouterr().out)
    assert [run["strategy"] for run in found["runs"]] == ["fully_async", "fully_async"]
    assert found["changed"] == []


def test_the_stages_of_runs_on_one_time_axis(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "made" / "stages.png"
    assert main(["report", *[str(folder)] * 3, "--timeline", str(picture)]) == EXIT_OK
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_json_has_the_account_and_the_advice(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder), "--json"]) == EXIT_OK
    found = json.loads(capsys.readouterr().out)
    assert found["advice"][0]["rule"] == "move_devices"
    assert found["advice"][0]["gain"] > 0.05
    seconds = found["device_seconds"]["train"]
    assert sum(s for reason, s in seconds.items() if reason != "devices") == pytest.approx(
        6 * json.loads((folder / "summary.json").read_text())["wall_s"], rel=0.01
    )
    assert sum(found["trainer"].values()) == pytest.approx(1.0)


def test_json_has_the_ratios_of_the_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both leave out the first step."""
    assert main(["report", str(folder), "--json"]) == EXIT_OK
    found = json.loads(capsys.readouterr().out)
    data = data_of(read_run(folder))
    assert data.accounting is not None and data.typical is not None
    assert found["bubble_ratio"] != round(data.accounting.bubble_ratio, 4)
    assert found["bubble_ratio"] == round(data.typical.bubble_ratio, 4)
    assert found["overlap_efficiency"] == round(data.typical.overlap_efficiency, 4)
    assert figures_of(data)["Devices idle"].text == percent(found["bubble_ratio"])


def test_the_share_that_the_engine_explains_is_in_text_and_json(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The smallest of the run; a run without one has null."""
    assert main(["report", str(folder), "--json"]) == EXIT_OK
    assert json.loads(capsys.readouterr().out)["explained_share"] is None
    run = tmp_path / "run"
    shutil.copytree(folder, run)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    done = [event for event in events if event.get("event") == "SERVED" and "load_s" in event]
    done[0] |= {"explained_share": 0.75, "unexplained": "head.weight"}
    done[1] |= {"explained_share": 1.0}
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert main(["report", str(run)]) == EXIT_OK
    assert f"  {map_coverage(0.75, 'head.weight')}\n" in capsys.readouterr().out
    assert main(["report", str(run), "--json"]) == EXIT_OK
    assert json.loads(capsys.readouterr().out)["explained_share"] == 0.75


def test_a_user_error_is_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "nowhere")]) == EXIT_USERS
    assert main(["report", *[str(folder)] * 3]) == EXIT_USERS
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert "is not a run directory" in errors[0]
    assert "got 3" in errors[1]


def test_a_trace_older_than_its_events_is_written_again(folder: Path) -> None:
    trace = folder / "trace.json"
    trace.write_text("{}")
    os.utime(trace, (1, 1))
    assert main(["report", str(folder), "--out", str(folder / "again.html")]) == EXIT_OK
    assert json.loads(trace.read_text())["traceEvents"]


FLAGS = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
    ),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 500])
def test_chromium_draws_the_page(folder: Path, tmp_path: Path, scheme: str, width: int) -> None:
    """In both colour schemes, without a script error, and no element is wider than the window."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs chromium; `apt-get install chromium` has it")
    main(["report", str(folder), "--out", str(tmp_path / "page.html")])
    page = tmp_path / "page.html"
    told = "addEventListener('error', (e) => (document.title = 'failed: ' + e.message));"
    width_of = (
        "document.title += ' wide ' + (document.documentElement.scrollWidth - innerWidth) + ' brush "
        "' + document.querySelectorAll('.brush').length"
    )
    html = (
        page.read_text()
        .replace("<head>", f"<head><script>{told}</script>")
        .replace("</body>", f"<script>{width_of}</script></body>")
    )
    page.write_text(html)
    picture = tmp_path / "page.png"
    common = [
        *FLAGS,
        f"--window-size={width},1200",
        f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}",
    ]
    shot = [
        browser,
        *common,
        f"--user-data-dir={tmp_path / 'shot'}",
        f"--screenshot={picture}",
        page.as_uri(),
    ]
    subprocess.run(shot, capture_output=True, timeout=HANG_S, check=True)
    dumped = subprocess.run(
        [browser, *common, f"--user-data-dir={tmp_path / 'dump'}", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    ).stdout
    title = dumped.partition("<title>")[2].partition("</title>")[0]
    assert "failed" not in title
    assert title.endswith("wide 0 brush 1"), title
    corner = first_pixel(picture)
    assert (sum(corner) < 150) == (scheme == "dark"), f"ground {corner}"


def first_pixel(picture: Path) -> tuple[int, ...]:
    """Return the first pixel of a PNG; its first row has no neighbours to differ from."""
    data = picture.read_bytes()
    at, packed = 8, b""
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        if kind == b"IDAT":
            packed += data[at + 8 : at + 8 + length]
        at += 12 + length
    return tuple(zlib.decompress(packed)[1:4])
