# SPDX-License-Identifier: Apache-2.0
"""What this package uses of the objects of each engine; `../declared.py` reads these files."""
