# SPDX-License-Identifier: Apache-2.0
"""The imports that all engine cores share. Only the fork server (`prefork`) imports this module."""

from ....processes import end_with_parent

end_with_parent()

import vllm.v1.engine.core  # noqa: E402
import vllm.v1.worker.cpu_worker  # noqa: E402, F401
