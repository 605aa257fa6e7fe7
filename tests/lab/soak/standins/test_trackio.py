# SPDX-License-Identifier: Apache-2.0
"""verl finds the tracker by its name, and it misbehaves when its control file requests it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from recipe.async_pipeline.lab.soak.job import STANDINS


def test_verl_finds_the_tracker_and_it_misbehaves_when_asked(tmp_path: Path) -> None:
    control = tmp_path / "mood"
    code = (
        "import pathlib, sys, threading\n"
        "import trackio\n"
        "from trackio import context_vars\n"
        "assert context_vars.current_run.get() is None\n"
        "trackio.init(project='p', name='n', config={})\n"
        "assert context_vars.current_run.get() is not None\n"
        "control = pathlib.Path(sys.argv[1])\n"
        "trackio.log({}, step=1)\n"
        "control.write_text(trackio.REFUSES)\n"
        "for call in (trackio.init, lambda: trackio.log({}, step=2)):\n"
        "    try:\n        call()\n"
        "    except ConnectionError as error:\n        assert '503' in str(error)\n"
        "    else:\n        raise AssertionError\n"
        "seen = pathlib.Path(f'{control}.seen')\n"
        "seen.unlink()\n"
        "control.write_text(trackio.HANGS)\n"
        "hangs = threading.Thread(target=trackio.log, args=({}, 3))\n"
        "hangs.start()\n"
        "while not seen.exists(): assert hangs.is_alive()\n"
        "control.unlink()\n"
        "hangs.join()\n"
        "trackio.finish()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(STANDINS), "ASYNC_PIPELINE_MOOD": str(control)}
    subprocess.run([sys.executable, "-c", code, str(control)], env=environment, check=True)
