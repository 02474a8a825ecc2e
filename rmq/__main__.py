# SPDX-License-Identifier: Apache-2.0
"""`python -m rmq` is the command `rmq`."""

from rmq.cli import main

main(prog_name="rmq")
