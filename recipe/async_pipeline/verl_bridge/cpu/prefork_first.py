# SPDX-License-Identifier: Apache-2.0
"""What the fork server of an engine's processes (`prefork`) imports first, to end with its parent."""

from ...processes import end_with_parent

end_with_parent()
