# SPDX-License-Identifier: Apache-2.0
from typing import Self, final

@final
class PutRules:
    def __new__(
        cls,
        *,
        max_message_size: int,
        max_record_size: int,
        allow_v2: bool,
        allow_ipv6: bool,
        append_crc: bool,
        drop_last_separator: bool,
        store_host: str,
    ) -> Self: ...
    @property
    def max_message_size(self) -> int: ...
    @property
    def max_record_size(self) -> int: ...
    @property
    def allow_v2(self) -> bool: ...
    @property
    def allow_ipv6(self) -> bool: ...
    @property
    def append_crc(self) -> bool: ...
    @property
    def drop_last_separator(self) -> bool: ...
    @property
    def store_host(self) -> bytes: ...
