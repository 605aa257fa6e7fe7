# SPDX-License-Identifier: Apache-2.0
"""A plan judges a chat template without torch, and leaves what it cannot judge to transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.async_pipeline.lab.tasks.tokenizer import make_tokenizer
from tests import REPOSITORY

pytestmark = pytest.mark.real_engine
CODE = """
import json
import sys
from recipe.async_pipeline.verl_bridge.launch.chat_check import why_no_chat

folder, *templates = json.loads(sys.argv[1])
print(json.dumps([[why_no_chat(folder, template, "{}"), "torch" in sys.modules] for template in templates]))
"""


def test_only_a_template_that_does_not_render_needs_torch(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    template = "{% for message in messages %}{{ message['content'] }}{% break %}{% endfor %}"
    given = [str(tmp_path), None, template, "{{ raise_exception('no system') }}"]
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(given)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    refused = "its chat template or special tokens do not fit (no system); correct them"
    assert json.loads(done.stdout.splitlines()[-1]) == [["", False], ["", False], [refused, True]]
