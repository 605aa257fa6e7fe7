# SPDX-License-Identifier: Apache-2.0
"""Groups between the draw of their prompt and the step that trains them, and what became of each."""
