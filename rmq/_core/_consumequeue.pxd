# SPDX-License-Identifier: Apache-2.0
"""Consume-queue units in batches: no state of its own."""
