# SPDX-License-Identifier: Apache-2.0
"""The imports that all engine cores share. Only the fork server (`prefork`) imports this module."""

from importlib import import_module

from ....processes import end_with_parent
from .prefork import IMPORTS

end_with_parent()
for name in IMPORTS:
    import_module(name)
