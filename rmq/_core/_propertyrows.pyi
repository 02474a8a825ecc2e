# SPDX-License-Identifier: Apache-2.0
from typing import Self, final

@final
class PropertyRows:
    def __new__(cls) -> Self: ...
