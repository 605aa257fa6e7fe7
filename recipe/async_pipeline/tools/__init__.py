# SPDX-License-Identifier: Apache-2.0
"""What is used before and after a run: reports, the planner, translations of other systems' files, the
doctor. Imports the run's folders; no run imports it.
"""
