# SPDX-License-Identifier: Apache-2.0
"""Imported by the process that engine cores are forked from (`prefork`), and only there: what they
all import.
"""

from ....processes import end_with_parent

end_with_parent()

import vllm.v1.engine.core  # noqa: E402
import vllm.v1.worker.cpu_worker  # noqa: E402, F401
