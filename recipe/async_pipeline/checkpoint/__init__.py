# SPDX-License-Identifier: Apache-2.0
"""What a run leaves on disk and resumes from. No verl and no Ray."""
