# SPDX-License-Identifier: Apache-2.0
"""Names of _layout.pxd for Python."""
