# SPDX-License-Identifier: Apache-2.0
"""What becomes of the keys of verl's configuration in a pipeline run. No run imports this package."""
