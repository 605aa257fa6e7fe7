# SPDX-License-Identifier: Apache-2.0
"""vLLM as a rollout engine."""
