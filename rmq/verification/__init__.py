# SPDX-License-Identifier: Apache-2.0
"""Every rule of a store directory, checked without a change: `verify`. The kinds of findings: `findings`."""
