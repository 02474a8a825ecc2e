# SPDX-License-Identifier: Apache-2.0
"""An S3 server in this process (moto), for tests. Objects are public when they are put so."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BUCKET = "stores"


class S3:
    """endpoint: where it answers. client: boto3's. before: called with key and headers of a read, may change them."""

    def __init__(self, endpoint: str, client: Any) -> None:
        self.endpoint, self.client = endpoint, client
        self.before: Callable[[str, dict[str, Any]], None] = lambda key, headers: None

    def handles(self, application: Any) -> Any:
        """A WSGI application that calls `before`. headers: as HTTP_RANGE."""
        def handle(environ: dict[str, Any], start: Any) -> Any:
            if environ["REQUEST_METHOD"] == "GET" and "HTTP_RANGE" in environ:
                self.before(environ["PATH_INFO"].removeprefix(f"/{BUCKET}/"), environ)
            return application(environ, start)

        return handle

    def upload(self, directory: Path, name: str, acl: str = "public-read") -> str:
        """The files below a directory as objects; their URI."""
        for path in sorted(directory.rglob("*")):
            if path.is_file():
                self.client.put_object(Bucket=BUCKET, Key=f"{name}/{path.relative_to(directory)}", ACL=acl,
                                       Body=path.read_bytes())  # fmt: skip
        return f"s3://{BUCKET}/{name}"


@contextmanager
def running() -> Iterator[S3]:
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id="a",
                              aws_secret_access_key="b")  # fmt: skip
        client.create_bucket(Bucket=BUCKET, ACL="public-read")
        found = S3(endpoint, client)
        server._server.app = found.handles(server._server.app)  # type: ignore[union-attr]
        yield found
    finally:
        server.stop()
