"""Report of a load: the origin of the value of every tensor, times and memory."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from loadstone import _core
from loadstone._files.receipt import Receipt
from loadstone._plan.provenance import Provenance


@dataclass
class Report:
    """The outcome of :meth:`loadstone.Plan.execute`.

    Attributes:
        provenance: one entry for every tensor reachable from the model.
        seconds: wall time from the first check to the last byte.
        bytes_read: bytes read from shards.
        bytes_written: bytes written into memory and offload files.
        staging_bytes_peak: the peak of bytes in flight, as counted by loadstone.
        bytes_read_ahead: bytes that the load asked the system to prefetch, because its page cache
            lacked them. The system does not report whether it did.
        readers: the final number of reader threads.
        is_interleaved: new memory came from all memory nodes in turns, as requested.
        process_bytes_peak: the largest resident set of the process until the load ended,
            including memory from before the load; 0 if the system does not report it.
        findings: the findings of the plan and of the load.
        sync_seconds: time spent flushing the files of the offload folder to disk.
        receipt: digests of the bytes read and of the loaded values, if requested.
    """

    provenance: dict[str, Provenance]
    seconds: float
    bytes_read: int
    bytes_written: int
    staging_bytes_peak: int
    peak_bytes: dict[str, int]
    findings: list[_core.Finding] = field(default_factory=list)
    sync_seconds: float = 0.0
    receipt: Receipt | None = None
    process_bytes_peak: int = 0
    bytes_read_ahead: int = 0
    readers: int = 0
    is_interleaved: bool = False

    @property
    def filled(self) -> list[Provenance]:
        """Tensors that the checkpoint lacks, filled because the caller requested it."""
        names = {finding.target for finding in filled_findings(self.findings)}
        return [item for name, item in self.provenance.items() if name in names]

    def to_json(self) -> str:
        """Return the JSON that the command prints, ``{provenance, ...}``, without the receipt."""
        members = {name: value for name, value in vars(self).items() if name != "receipt"}
        return json.dumps(members, default=_members, indent=1)

    def __repr__(self) -> str:
        rate = self.bytes_read / self.seconds / 1e9 if self.seconds else 0.0
        return (
            f"Report({len(self.provenance)} tensors, {self.bytes_read} bytes read "
            f"in {self.seconds:.3f} s, {rate:.2f} GB/s)"
        )


def _members(item: Any) -> dict[str, Any]:
    """Return the fields of an object for JSON, which has no encoding for its type."""
    names = dir(item) if isinstance(item, _core.Finding) else vars(item)
    return {name: getattr(item, name) for name in names if not name.startswith("_")}


def filled_findings(findings: Iterable[_core.Finding]) -> list[_core.Finding]:
    return [
        finding
        for finding in findings
        if finding.code == "plan.missing" and finding.severity == "warning" and finding.target
    ]


def human_bytes(count: int) -> str:
    if count < 1000:
        return f"{count} B"
    size = count / 1000
    for unit in ("kB", "MB", "GB", "TB"):
        if size < 999.95 or unit == "TB":
            break
        size /= 1000
    return f"{size:.1f} {unit}"
