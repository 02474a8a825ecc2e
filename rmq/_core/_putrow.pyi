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
