# SPDX-License-Identifier: Apache-2.0
"""Compiled core: bytes under a borrowed pointer. Opens no path, reads no clock."""
