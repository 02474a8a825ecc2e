# SPDX-License-Identifier: Apache-2.0
"""Bodies where they lie, as Arrow's views."""
