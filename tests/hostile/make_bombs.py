"""Write this folder's small torch files that take much memory or time to read.

Run it once, in this folder. Each file exceeds one budget of SECURITY.md: a careless reader expands
its few kilobytes to gigabytes or works on it for hours. A factor enlarges the files and writes them
to a different folder:
    python make_bombs.py [FACTOR FOLDER]
"""

import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

STOP = b"."
VALUES = struct.pack("<f", 1.0)


def text(value: str | bytes) -> bytes:
    """Encode as BINUNICODE."""
    data = value if isinstance(value, bytes) else value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    """Encode as BININT, or LONG1 for larger values."""
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    return b"\x8a\x08" + struct.pack("<q", value)


def numbers(values: list[int]) -> bytes:
    """Encode a tuple of integers."""
    return b"(" + b"".join(map(number, values)) + b"t"


def tensor(
    size: bytes, stride: bytes, elements: int = 1, storage: str = "FloatStorage", offset: int = 0
) -> bytes:
    """Encode a call of torch._utils._rebuild_tensor_v2."""
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n(("
        + text("storage")
        + b"ctorch\n"
        + storage.encode()
        + b"\n"
        + text("0")
        + text("cpu")
        + number(elements)
        + b"tQ"
        + number(offset)
        + size
        + stride
        + b"\x89ccollections\nOrderedDict\n)RtR"
    )


ONE = tensor(numbers([1]), numbers([1]))
MEMO, POP = b"q\x01", b"0"
GET = b"h\x01"


def stack_global(n: int) -> bytes:
    """Encode STACK_GLOBAL many times, each with one long string as module and as name."""
    return text("a" * n) + MEMO + POP + (GET + GET + b"\x93" + POP) * (n // 6) + b"}"


def rank(n: int) -> bytes:
    """Store one tensor of many dims under many names."""
    size = b"(" + number(1) + b"2" * (n - 1) + b"tq\x020"
    one = tensor(b"h\x02", b"h\x02") + MEMO + POP
    return size + one + b"}(" + b"".join(text(f"{k:x}") + GET for k in range(n // 8)) + b"u"


def key(n: int) -> bytes:
    """Use one long key for many values."""
    return text("a" * n) + MEMO + POP + b"}(" + (GET + b"N") * n + b"u"


def key_beside(n: int) -> bytes:
    """Use one long key next to a state dict, so that findings list it as ignored."""
    inner = text("state_dict") + b"}" + text("w") + ONE + b"s"
    return text("a" * n) + MEMO + POP + b"}(" + inner + (GET + b"N") * n + b"u"


def prefix(n: int) -> bytes:
    """Wrap a dict of many tensors in one long key."""
    inner = b"}(" + b"".join(text(f"{k:x}") + GET for k in range(n // 8)) + b"u"
    return ONE + MEMO + POP + b"}" + text("a" * n) + inner + b"s"


def ordered_dict(n: int) -> bytes:
    """Make many dicts from one list of pairs."""
    pair = b"(" + text("k") + b"Ntq\x020"
    made = b"ccollections\nOrderedDict\n" + GET + b"\x85R" + POP
    return pair + b"](" + b"h\x02" * n + b"e" + MEMO + POP + made * (n // 4) + b"}"


def wrapper(n: int) -> bytes:
    """Store one dict without tensors under many keys that may be the state dict."""
    inner = b"}(" + text("x") + b"](" + b"]" * n + b"eu" + MEMO + POP
    return inner + text("state_dict") + b"q\x020" + b"}(" + (b"h\x02" + GET) * n + b"u"


def empties(n: int) -> bytes:
    """Store one empty tuple per byte."""
    return b"}" + text("x") + b"(" + b")" * n + b"ts"


def expanded(n: int) -> bytes:
    """Expand one value to a large tensor with stride 0."""
    return b"}" + text("w") + tensor(numbers([1 << 20, n]), numbers([0, 0])) + b"s"


def views(n: int) -> bytes:
    """Store many tensors that are views of one storage, at increasing offsets."""
    count = 4096 * (n // 64)
    made = (
        text(f"{k:x}") + tensor(numbers([count // 2]), numbers([1]), count, offset=k)
        for k in range(n // 2)
    )
    return b"}(" + b"".join(made) + b"u"


def not_utf8(_: int) -> bytes:
    """Use a name that is not valid UTF-8."""
    return b"}" + text(b"bad\xff\xfe") + ONE + b"s"


def surrogate(_: int) -> bytes:
    """Use a name with half of a surrogate pair, as Python writes it."""
    return b"}" + text("half\ud800".encode("utf-8", "surrogatepass")) + ONE + b"s"


def complex128(_: int) -> bytes:
    """Store a transposed 33 x 33 tensor of the widest dtype."""
    made = tensor(numbers([33, 33]), numbers([1, 33]), 33 * 33, "ComplexDoubleStorage")
    return b"}" + text("w") + made + b"s"


BOMBS: dict[str, tuple[Callable[[int], bytes], int]] = {
    "pt_bomb_stack_global": (stack_global, 8_000),
    "pt_bomb_rank": (rank, 8_000),
    "pt_bomb_key": (key, 8_000),
    "pt_bomb_key_beside": (key_beside, 8_000),
    "pt_bomb_prefix": (prefix, 8_000),
    "pt_bomb_ordered_dict": (ordered_dict, 8_000),
    "pt_bomb_wrapper": (wrapper, 8_000),
    "pt_bomb_empties": (empties, 8_000),
    "pt_bomb_expanded": (expanded, 1 << 20),
    "pt_bomb_views": (views, 64),
    "pt_name_not_utf8": (not_utf8, 0),
    "pt_name_surrogate": (surrogate, 0),
    "pt_ok_complex128": (complex128, 0),
}


def values_of(name: str, n: int) -> bytes:
    """Return the bytes of the archive's storage 0."""
    if name == "pt_bomb_views":
        return VALUES * (4096 * (n // 64))
    return bytes(33 * 33 * 16) if name == "pt_ok_complex128" else VALUES


def write(folder: Path, name: str, factor: int = 1) -> Path:
    """Write the file of one bomb, enlarged by the factor, and return its path."""
    make, n = BOMBS[name]
    path = folder / f"{name}.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for record, data in (
            ("data.pkl", b"\x80\x02" + make(n * factor) + STOP),
            ("byteorder", b"little"),
            ("data/0", values_of(name, n * factor)),
            ("version", b"3\n"),
        ):
            archive.writestr(zipfile.ZipInfo(f"archive/{record}"), data)
    return path


if __name__ == "__main__":
    where = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).parent / "torch"
    for each in BOMBS:
        print(write(where, each, int(sys.argv[1]) if len(sys.argv) > 1 else 1))
