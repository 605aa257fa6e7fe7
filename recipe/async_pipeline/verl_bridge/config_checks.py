# SPDX-License-Identifier: Apache-2.0
"""The checks of a configuration, `rules.config_checks`, under the path that scripts outside import."""

from .rules.config_checks import Checked, checked, set_verls_keys

__all__ = ["Checked", "checked", "set_verls_keys"]
