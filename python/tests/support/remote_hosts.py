"""Imitates a model hub and an object store."""

from __future__ import annotations

import hashlib
import hmac
import json
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.sax.saxutils import escape

from remote_server import Answer, Seen, Server

OLD, NEW = "a" * 40, "b" * 40
TOKEN = "hf_TOKEN"
KEY, SECRET, SESSION = "AKID", "SECRET/KEY", "SESSION"


class Hub:
    """A model hub with repositories below /ORG/NAME/resolve; a second host serves large files."""

    def __init__(self, server: Server, folder: Path, token: str = "") -> None:
        self.server, self.folder, self.token = server, folder, token
        self.main = OLD
        self.signature = "first"
        self.lists = True
        server.route = self.route

    def route(self, seen: Seen) -> Answer | None:
        parts = urlsplit(seen.path)
        if parts.path.startswith("/cdn/"):
            assert "authorization" not in seen.headers
            if parts.query != f"sig={self.signature}":
                return Answer(403, {}, b"expired")
            return self.server.ranged(seen, parts.path)
        if parts.path.startswith("/api/models/org/"):
            return self._tree(seen, parts.path, parts.query)
        if not parts.path.startswith("/org/"):
            return None
        if self.token and seen.headers.get("authorization") != f"Bearer {self.token}":
            return Answer(401, {}, b"")
        _, _, name, _, revision, file = parts.path.split("/", 5)
        commit = {"main": self.main, OLD: OLD, NEW: NEW}.get(revision)
        if commit is None:
            return Answer(404, {"X-Error-Code": "RevisionNotFound"}, b"")
        headers = {"X-Repo-Commit": commit}
        path = self.folder / name / file
        if not path.is_file():
            return Answer(404, headers | {"X-Error-Code": "EntryNotFound"}, b"")
        served = f"/cdn/{commit}/{name}/{file}"
        self.server.files[served] = path.read_bytes()
        if file.endswith(".json"):
            answer = self.server.ranged(seen, served)
            return Answer(answer.status, answer.headers | headers, answer.body)
        headers |= {
            "X-Linked-Etag": f'"{commit}"',
            "Location": self.server.url(f"{served}?sig={self.signature}", host="localhost"),
        }
        return Answer(302, headers, b"")

    def _tree(self, seen: Seen, path: str, query: str) -> Answer | None:
        """List the files of a folder in pages of five, like the hub's API."""
        if self.token and seen.headers.get("authorization") != f"Bearer {self.token}":
            return Answer(401, {}, b"")
        name, _, revision, *below = path.removeprefix("/api/models/org/").split("/")
        folder = self.folder.joinpath(name, *below)
        if not self.lists or revision not in (OLD, NEW) or not folder.is_dir():
            return Answer(404, {}, b"")
        begin = int(query.removeprefix("cursor=") or 0)
        paths = sorted(folder.iterdir())
        rows = [
            {
                "type": "directory" if each.is_dir() else "file",
                "path": str(each.relative_to(self.folder / name)),
            }
            for each in paths[begin : begin + 5]
        ]
        more = begin + 5 < len(paths)
        link = f'<{self.server.url(path)}?cursor={begin + 5}>; rel="next"' if more else ""
        return Answer(200, {"Link": link}, json.dumps(rows).encode())


class Store:
    """An object store with buckets in the path; requests must have a signature of version 4."""

    def __init__(self, server: Server, session: str = "") -> None:
        self.server, self.session = server, session
        self.checked = 0
        self.lists = True
        server.route = self.route

    def route(self, seen: Seen) -> Answer | None:
        expected = self._signature(seen)
        if not hmac.compare_digest(expected, seen.headers.get("authorization", "")):
            return Answer(403, {}, b"<Code>SignatureDoesNotMatch</Code>")
        self.checked += 1
        parts = urlsplit(seen.path)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        return self._list(parts.path, query) if "list-type" in query else None

    def _list(self, path: str, query: dict[str, str]) -> Answer:
        """List keys in pages of five, like ListObjectsV2."""
        if not self.lists:
            return Answer(403, {}, b"<Code>AccessDenied</Code>")
        bucket = unquote(path).rstrip("/") + "/"
        prefix = query["prefix"]
        all_keys = [
            file.removeprefix(bucket) for file in self.server.files if file.startswith(bucket)
        ]
        keys = sorted(
            key for key in all_keys if key.startswith(prefix) and "/" not in key[len(prefix) :]
        )
        begin = int(query.get("continuation-token", "/&0").removeprefix("/&"))
        more = begin + 5 < len(keys)
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>1</Size></Contents>"
            for key in keys[begin : begin + 5]
        )
        token = f"<NextContinuationToken>/&amp;{begin + 5}</NextContinuationToken>" if more else ""
        text = (
            '<?xml version="1.0"?>'
            '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{rows}{token}</ListBucketResult>"
        )
        return Answer(200, {}, text.encode())

    def _signature(self, seen: Seen) -> str:
        """Compute AWS's signature version 4 independently of loadstone."""
        given = dict(
            part.strip().split("=", 1)
            for part in seen.headers.get("authorization", "").partition(" ")[2].split(",")
            if "=" in part
        )
        names = given.get("SignedHeaders", "").split(";")
        if not {"host", "x-amz-content-sha256", "x-amz-date"} <= set(names):
            return "unsigned"
        if self.session and "x-amz-security-token" not in names:
            return "no session"
        stamp = seen.headers["x-amz-date"]
        path = quote(urlsplit(seen.path).path, safe="/%~")
        pairs = parse_qsl(urlsplit(seen.path).query, keep_blank_values=True)
        query = "&".join(sorted(f"{quote(k, safe='~')}={quote(v, safe='~')}" for k, v in pairs))
        lines = "".join(f"{name}:{seen.headers[name].strip()}\n" for name in names)
        request = "\n".join(
            ["GET", path, query, lines, ";".join(names), seen.headers["x-amz-content-sha256"]]
        )
        scope = f"{stamp[:8]}/eu-west-1/s3/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
        key = b"AWS4" + SECRET.encode()
        for part in (stamp[:8], "eu-west-1", "s3", "aws4_request"):
            key = hmac.digest(key, part.encode(), "sha256")
        signature = hmac.new(key, text.encode(), "sha256").hexdigest()
        return (
            f"AWS4-HMAC-SHA256 Credential={KEY}/{scope}, "
            f"SignedHeaders={';'.join(names)}, Signature={signature}"
        )
