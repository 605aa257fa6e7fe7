# SPDX-License-Identifier: Apache-2.0
"""A Triton backend for the CPU that compiles nothing: with TRITON_INTERPRET=1 Triton runs kernels in Python.

vLLM's V2 model runner needs a backend for the CPU. run_scripts/cpu_env.sh puts this one on the path if that
runner is wanted.
"""

from triton.backends.compiler import BaseBackend


class Interpreter(BaseBackend):
    """Is found, and never asked."""


Interpreter.__abstractmethods__ = frozenset()
