"""Imitations of a model hub and of an object store."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from urllib.parse import quote, urlsplit

from remote_server import Answer, Seen, Server

OLD, NEW = "a" * 40, "b" * 40
TOKEN = "hf_TOKEN"
KEY, SECRET, SESSION = "AKID", "SECRET/KEY", "SESSION"


class Hub:
    """Repositories below /ORG/NAME/resolve; large files are served by another host name."""

    def __init__(self, server: Server, folder: Path, token: str = "") -> None:
        self.server, self.folder, self.token = server, folder, token
        self.main = OLD
        self.signature = "first"
        server.route = self.route

    def route(self, seen: Seen) -> Answer | None:
        parts = urlsplit(seen.path)
        if parts.path.startswith("/cdn/"):
            assert "authorization" not in seen.headers
            if parts.query != f"sig={self.signature}":
                return Answer(403, {}, b"expired")
            return self.server.ranged(seen, parts.path)
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


class Store:
    """Buckets in the path; each request must carry a signature of version 4."""

    def __init__(self, server: Server, session: str = "") -> None:
        self.server, self.session = server, session
        self.checked = 0
        server.route = self.route

    def route(self, seen: Seen) -> Answer | None:
        expected = self._signature(seen)
        if not hmac.compare_digest(expected, seen.headers.get("authorization", "")):
            return Answer(403, {}, b"<Code>SignatureDoesNotMatch</Code>")
        self.checked += 1
        return None

    def _signature(self, seen: Seen) -> str:
        """By AWS's description of signature version 4, with this module's own arithmetic."""
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
        lines = "".join(f"{name}:{seen.headers[name].strip()}\n" for name in names)
        request = "\n".join(
            ["GET", path, "", lines, ";".join(names), seen.headers["x-amz-content-sha256"]]
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
